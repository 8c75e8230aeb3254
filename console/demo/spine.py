"""The spine of the demo. On one machine every path is as fast as any other; so what is placed across the
spine goes through here on its way to the node, and all of it together gets few bytes a second.

What is on a rail never comes by: a stream that is brought back is as fast as before.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Final, Self

from console.demo import places
from console.stack.endpoint import LOOPBACK

BYTES_A_SECOND: Final = 24 << 10  # to the nodes, for all streams; what comes back is not held up
PIECE_BYTES: Final = 16 << 10  # what one carries before it is the next one's turn


class Link:
    """What all share. A piece takes its time, after those before it."""

    def __init__(self, bytes_a_second: float) -> None:
        self._bytes_a_second = bytes_a_second
        self._free_at = 0.0

    async def carry(self, count: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + count / self._bytes_a_second
        await asyncio.sleep(self._free_at - now)


async def join(
    agent: Path, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """What somebody who has connected says, over the link to an agent's socket; and its answers back."""
    try:
        answers, there = await asyncio.open_unix_connection(agent, limit=PIECE_BYTES)
    except OSError:  # the agent is away, and so it is for who asks here
        writer.close()
        return
    await asyncio.gather(_pump(reader, there, link), _pump(answers, writer))


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link | None = None
) -> None:
    """Until either side ends."""
    try:
        while piece := await reader.read(PIECE_BYTES):
            if link:
                await link.carry(len(piece))
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass  # an end like any other
    finally:
        writer.close()


class Spine:
    """A relay to each node, in a thread. Where they listen stands in files: drivers are told."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="spine")
        self._sockets: dict[str, socket.socket] = {}

    def __enter__(self) -> Self:
        for node in places.NODES:
            self._sockets[node] = socket.create_server((LOOPBACK, 0))
            _, port = self._sockets[node].getsockname()
            places.over_spine(self._state, node).write_text(f"tcp:{LOOPBACK}:{port}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        link = Link(BYTES_A_SECOND)
        servers = []
        for node, listening in self._sockets.items():
            joined = partial(join, places.data_socket(self._state, node), link)
            servers.append(await asyncio.start_server(joined, sock=listening, limit=PIECE_BYTES))
        await self._stop.wait()
        for server in servers:
            server.close()
