"""The slow spine of the demo. On one machine all paths are equally fast, so streams that are placed
across the spine go through a relay, which limits their total bandwidth. Streams on a rail do not use it.
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
from kvss_agent.data_plane.address import Address
from kvss_agent.process.durable_file import write_durably

BYTES_A_SECOND: Final = 24 << 10  # to the nodes, for all streams; the other direction is not limited
PIECE_BYTES: Final = 16 << 10  # sent per turn of a stream
# As on a wire: a sender over the loopback has room for 4 MiB, which hide a slow path.
SEGMENT_BYTES: Final = 1400


class Link:
    """The bandwidth that all streams share, first come, first served."""

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
    """Relay a connection over the link to an agent's socket, and the answers back."""
    try:
        answers, there = await asyncio.open_unix_connection(agent, limit=PIECE_BYTES)
    except OSError:  # the agent is away
        writer.close()
        return
    await asyncio.gather(_pump(reader, there, link), _pump(answers, writer))


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link | None = None
) -> None:
    """Copy until either side closes."""
    try:
        while piece := await reader.read(PIECE_BYTES):
            if link:
                await link.carry(len(piece))
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass  # a closed connection
    finally:
        writer.close()


class Spine:
    """A relay to each node, in a thread. Files name their addresses, which the console tells drivers."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="spine")
        self._sockets: dict[str, socket.socket] = {}

    def __enter__(self) -> Self:
        for node in places.NODES:
            listening = self._sockets[node] = self._listen(node)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            _, port = listening.getsockname()
            # Whole, whenever this is killed: the next start reads it.
            write_durably(places.over_spine(self._state, node), f"tcp:{LOOPBACK}:{port}".encode())
        self._thread.start()
        return self

    def _listen(self, node: str) -> socket.socket:
        """At the port of the last start: a driver asks at that address whether a home that it has left
        is empty, also after a restart, and no purge is confirmed before."""
        written = places.over_spine(self._state, node)
        last = Address.parse(written.read_text()).port if written.exists() else 0
        try:
            return socket.create_server((LOOPBACK, last))
        except OSError:  # somebody else has it by now
            return socket.create_server((LOOPBACK, 0))

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
