"""Other routers, as they are shipped, placing the same requests.

They choose by real time as little as ours does: a request is sent over HTTP, the router passes it to one
of the backends here, and the emulated time goes on only once it is known to which. The backend answers
when the emulated engine does. So what a router knows, and when, is what it would know before real
engines; how fast this machine is has no part in it, and the time that routing itself takes is not
counted, in nobody's disfavor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Final

import aiohttp
import msgspec
from aiohttp import web

from benchmarks.children import end
from benchmarks.peers.environment import PROJECT, Unavailable
from benchmarks.routing.fleet import Fleet, Router
from benchmarks.routing.traffic import Asking
from console.stack.endpoint import free_port
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.keys import COLUMN_TOKENS

ENVIRONMENT: Final = PROJECT / ".tidegate" / "routers"
PYTHON: Final = ENVIRONMENT / "bin" / "python"
MODEL: Final = "emulated"
COLUMN_CHARACTERS: Final = 8
START_SECONDS: Final = 90.0
ANSWER_SECONDS: Final = 120.0
# Sizes of trees are in characters; a token has about four, and here an eighth of one.
SGLANG: Final = ("-m", "sglang_router.launch_router", "--policy", "cache_aware")
SMG: Final = ("-m", "smg", "launch", "--policy", "cache_aware")
VLLM: Final = ("-m", "vllm_router.launch_router", "--policy", "cache_aware")
HTTP_ROUTERS: Final = {"sglang-router": SGLANG, "smg": SMG, "vllm-router": VLLM}
DYNAMO: Final = "dynamo"
NAMES: Final = (DYNAMO, *HTTP_ROUTERS)
_LENGTH = struct.Struct("<I")


def check() -> None:
    """Raises Unavailable where the routers are not installed."""
    if not PYTHON.exists():
        raise Unavailable("the other routers are not installed (make routers-environment)")


class Backends:
    """Engines as routers see them: they answer when they are told to."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._runner: web.AppRunner | None = None
        self._numbers: dict[int, int] = {}  # of each port
        self.arrived: dict[int, asyncio.Future[int]] = {}  # by request: at which backend
        self.answers: dict[int, asyncio.Event] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._numbers]

    async def start(self) -> None:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        for number in range(self._count):
            site = web.TCPSite(self._runner, "127.0.0.1", port := free_port())
            await site.start()
            self._numbers[port] = number

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        told = msgspec.json.decode(await request.read())
        number = told["seed"]
        assert request.transport
        arrived = self.arrived[number]
        if not arrived.done():  # a router may try again
            arrived.set_result(self._numbers[request.transport.get_extra_info("sockname")[1]])
        await self.answers[number].wait()
        choice = {"index": 0, "text": "", "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {
                "id": str(number),
                "object": "text_completion",
                "model": MODEL,
                "choices": [choice],
                "usage": usage,
            }
        )

    async def _other(self, request: web.Request) -> web.Response:
        """What routers ask of their workers: health, models, what they are."""
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "max_model_len": 1 << 20}],
                "model_path": MODEL,
                "served_model_name": MODEL,
                "is_generation": True,
                "version": "1",
                "path": request.path,
            }
        )


class HttpRouter(Router):
    """A router as a process, before backends of ours."""

    def __init__(self, name: str, columns: int) -> None:
        self._name = name
        self._columns = columns  # of a replica's cache
        self._backends = Backends(0)
        self._process: subprocess.Popen[bytes] | None = None
        self._client: aiohttp.ClientSession | None = None
        self._url = ""
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `finish`

    async def begin(self, fleet: Fleet) -> None:
        check()
        self._backends = Backends(len(fleet.replicas))
        await self._backends.start()
        port, metrics = free_port(), free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [
            str(PYTHON),
            *HTTP_ROUTERS[self._name],
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
            *("--max-tree-size", str(self._columns * COLUMN_CHARACTERS)),
            *("--eviction-interval-secs", "1"),
            *("--worker-urls", *self._backends.urls),
        ]
        self._process = subprocess.Popen(  # noqa: ASYNC220 - nothing else goes on meanwhile
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, cwd=ENVIRONMENT
        )
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._is_ready():
                    if self._process.poll() is not None:
                        raise Unavailable(f"{self._name} has ended: {self.last_words()}")
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise Unavailable(f"{self._name} was not ready in time: {self.last_words()}") from None

    def last_words(self) -> str:
        self._log.seek(0)
        return " ".join(self._log.read().decode(errors="replace")[-400:].split())

    async def _is_ready(self) -> bool:
        """Whether a request gets through, which workers have to be known for."""
        probe = -1
        loop = asyncio.get_running_loop()
        self._backends.arrived[probe] = loop.create_future()
        self._backends.answers[probe] = asyncio.Event()
        self._backends.answers[probe].set()
        try:
            async with asyncio.timeout(5):
                await self._ask(probe, "ready?")
        except (aiohttp.ClientError, TimeoutError, Unavailable):
            return False
        return True

    async def _ask(self, number: int, text: str) -> None:
        assert self._client
        body = {"model": MODEL, "prompt": text, "max_tokens": 1, "seed": number}
        async with self._client.post(f"{self._url}/v1/completions", json=body) as answer:
            await answer.read()
            if answer.status != 200:
                raise Unavailable(f"{self._name} answers {answer.status}")

    async def place(self, asking: Asking, now: float) -> int:  # noqa: ARG002
        number = asking.number
        arrived = self._backends.arrived[number] = asyncio.get_running_loop().create_future()
        self._backends.answers[number] = asyncio.Event()
        task = self._asked[number] = asyncio.create_task(self._ask(number, asking.text))
        done, _ = await asyncio.wait(
            [arrived, task], timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if arrived not in done:
            reason = task.exception() if task in done else "no backend was asked"
            raise Unavailable(f"{self._name} places nothing: {reason}; {self.last_words()}")
        place: int = arrived.result()
        return place

    async def end(self, asking: Asking, now: float) -> None:  # noqa: ARG002
        self._backends.answers.pop(asking.number).set()
        await self._asked.pop(asking.number)
        del self._backends.arrived[asking.number]

    async def finish(self) -> None:
        for task in self._asked.values():
            task.cancel()
        if self._client:
            await self._client.close()
        if self._process:
            end(self._process, 10)
        await self._backends.stop()
        self._log.close()


class Dynamo(Router):
    """Dynamo's SelectionService in a process of its own, with events of what replicas store."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._process: asyncio.subprocess.Process | None = None
        self._runs: dict[int, tuple[bytes, list[bytes]]] = {}  # stored, not sent yet
        self._removed: dict[int, list[bytes]] = {}

    async def begin(self, fleet: Fleet) -> None:
        check()
        self._process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), str(Path(__file__).with_name("run_dynamo.py"))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=ENVIRONMENT,
            env={**os.environ, "DYN_LOG": "off"},
        )
        for replica in fleet.replicas:
            replica.watch(self)
        self._tell("begin", len(fleet.replicas), self._columns, fleet.timing.step_tokens)
        await self._answer()

    def _tell(self, verb: str, *arguments: object) -> None:
        assert self._process
        assert self._process.stdin
        raw = msgspec.msgpack.encode([verb, *arguments])
        self._process.stdin.write(_LENGTH.pack(len(raw)) + raw)

    async def _answer(self) -> int:
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        await self._process.stdin.drain()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                raw = await self._process.stdout.readexactly(_LENGTH.size)
        except (TimeoutError, asyncio.IncompleteReadError):
            raise Unavailable("Dynamo's SelectionService does not answer") from None
        return int(_LENGTH.unpack(raw)[0])

    def arrived(self, replica: int, column: Column, now: float) -> None:  # noqa: ARG002
        self._send_removed(replica)
        parent = column.parent.key if column.parent else b""
        run = self._runs.get(replica)
        if run and run[1][-1] == parent:
            run[1].append(column.key)
            return
        self._send_stored(replica)
        self._runs[replica] = (parent, [column.key])

    def removed(self, replica: int, column: Column, now: float) -> None:  # noqa: ARG002
        self._send_stored(replica)
        self._removed.setdefault(replica, []).append(column.key)

    def _send_stored(self, replica: int) -> None:
        if run := self._runs.pop(replica, None):
            self._tell("stored", replica, run[0], b"".join(run[1]))

    def _send_removed(self, replica: int) -> None:
        if keys := self._removed.pop(replica, None):
            self._tell("removed", replica, b"".join(keys))

    async def place(self, asking: Asking, now: float) -> int:  # noqa: ARG002
        for replica in {*self._runs, *self._removed}:
            self._send_stored(replica)
            self._send_removed(replica)
        tail = [asking.number % 60_000] * (asking.tokens % COLUMN_TOKENS * 8 // COLUMN_TOKENS)
        keys = b"".join(asking.columns)
        if not keys and not tail:
            tail = [0]
        self._tell("place", str(asking.number), keys, tail)
        return await self._answer()

    async def first_token(self, asking: Asking, cached: int, now: float) -> None:  # noqa: ARG002
        self._tell("first_token", str(asking.number))

    async def end(self, asking: Asking, now: float) -> None:  # noqa: ARG002
        self._tell("end", str(asking.number))

    async def finish(self) -> None:
        if self._process and self._process.stdin:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


def make(name: str, columns: int) -> HttpRouter | Dynamo:
    """Newly made, for replicas with so many columns."""
    return Dynamo(columns) if name == DYNAMO else HttpRouter(name, columns)
