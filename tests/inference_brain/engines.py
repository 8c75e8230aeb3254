"""Engines that only look like some: servers with OpenAI's API that stream made-up tokens, count, and
fail on demand. One runs in a thread of its own, on a port of its own.

    with FakeEngine(tokens=5) as engine:
        engine.behavior.stall_after = 2      # tokens, then nothing comes any more
        engine.kill()                        # connections break, and nobody listens
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import msgspec


@dataclass
class Behavior:
    """What the engine does from now on. `…_after`: so many tokens."""

    tokens: int = 4
    first_seconds: float = 0.0  # before the first token
    is_held: bool = False  # nothing gets its first token
    first_with: int = 0  # requests that have to be there before any of them gets its first token
    between_seconds: float = 0.0
    stall_after: int | None = None
    die_after: int | None = None  # the connection breaks
    error_after: int | None = None  # an error event in the stream,
    error_code: int = 500  # with this code
    status: int = 200  # of answers
    error: str = "The engine says no."
    headers: Mapping[str, str] = field(default_factory=dict)  # of that error
    cached_tokens: int | None = 0
    text: str = "tok"


@dataclass
class Asked:
    """A request as the engine has got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    has_left: bool = False  # the brain has closed the connection before the end
    tokens_sent: int = 0


@dataclass
class FakeEngine:
    """`port`: 0 for any; another engine may take the same one later."""

    behavior: Behavior = field(default_factory=Behavior)
    served_as: str = "m"
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    now_running: int = 0
    most_running: int = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, again after `kill` on the same port."""
        self._run(self._start())

    def kill(self) -> None:
        """As if the process were killed: connections are reset, and nobody listens."""
        self._run(self._kill())

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """As if the process were stopped: the system takes connections, and nothing answers."""
        goes_on = threading.Event()
        self._loop.call_soon_threadsafe(goes_on.wait)
        try:
            yield
        finally:
            goes_on.set()

    def _run(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(60)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self.port, limit=64 << 20, backlog=2048
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _kill(self) -> None:
        # What was accepted just now has no writer yet. Were the server closed before the task of such a
        # connection has begun, or the task cancelled, its socket would be left open.
        for listener in self._server.sockets:
            self._loop.remove_reader(listener.fileno())
        await asyncio.sleep(0)
        self._server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in list(self._connections):
                writer.transport.abort()
            await asyncio.wait(tasks, timeout=0.01)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.strip().split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (one.partition(":") for one in rest)
        }
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            self._whole(writer, 200, {"object": "list", "data": []})
            await writer.drain()
            return True
        asked = Asked(path, headers, msgspec.json.decode(raw))
        self.asked.append(asked)
        self.now_running += 1
        self.most_running = max(self.most_running, self.now_running)
        left = asyncio.ensure_future(reader.read(1))
        answering = asyncio.ensure_future(self._answer(writer, asked, self.behavior))
        try:
            await asyncio.wait([left, answering], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                asked.has_left = True
                return False
            if answering.exception():  # while it was written
                asked.has_left = True
                return False
            left.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await left
            return answering.result()
        finally:
            self.now_running -= 1
            answering.cancel()
            left.cancel()

    async def _answer(self, writer: asyncio.StreamWriter, asked: Asked, how: Behavior) -> bool:
        if how.status != 200:
            error = {"message": how.error, "type": "BadRequestError", "param": None, "code": how.status}
            self._whole(writer, how.status, {"error": error}, how.headers)
            await writer.drain()
            return True
        is_chat = asked.path.endswith("/chat/completions")
        usage = self._usage(asked, how)
        name = asked.headers.get("x-request-id", "none")
        common = {"id": f"cmpl-{name}", "created": int(time.time()), "model": self.served_as}
        if how.first_seconds:
            await asyncio.sleep(how.first_seconds)
        while how.is_held or self.most_running < how.first_with:  # noqa: ASYNC110 - of other threads
            await asyncio.sleep(0.05)
        if not asked.body.get("stream"):
            for count in range(how.tokens):
                if how.die_after == count:
                    writer.transport.abort()
                    return False
                if how.stall_after == count:
                    await asyncio.sleep(3600)
                if how.between_seconds:
                    await asyncio.sleep(how.between_seconds)
            choices = [_choice(is_chat, index, how) for index in range(asked.body.get("n") or 1)]
            kind = "chat.completion" if is_chat else "text_completion"
            self._whole(writer, 200, {**common, "object": kind, "choices": choices, "usage": usage})
            await writer.drain()
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        for count in range(how.tokens):
            if how.die_after == count:
                await writer.drain()
                writer.transport.abort()
                return False
            if how.stall_after == count:
                await writer.drain()
                await asyncio.sleep(3600)
            if how.error_after == count:
                broke = {"message": "The engine broke.", "type": "x", "code": how.error_code}
                _event(writer, {"error": broke})
                break
            if how.between_seconds:
                await asyncio.sleep(how.between_seconds)
            finish = "stop" if count == how.tokens - 1 else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
            if is_chat:
                choice["delta"] = (
                    {"role": "assistant", "content": how.text} if not count else {"content": how.text}
                )
            else:
                choice["text"] = how.text
            _event(writer, {**common, "object": kind, "choices": [choice]})
            asked.tokens_sent += 1
            await writer.drain()
        options = asked.body.get("stream_options") or {}
        if options.get("include_usage"):
            _event(writer, {**common, "object": kind, "choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _usage(self, asked: Asked, how: Behavior) -> dict[str, Any]:
        prompt = asked.body.get("prompt")
        count = len(prompt) if isinstance(prompt, list) else 7
        usage: dict[str, Any] = {
            "prompt_tokens": count,
            "completion_tokens": how.tokens,
            "total_tokens": count + how.tokens,
        }
        if how.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": how.cached_tokens}
        return usage

    def _whole(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        value: object,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        raw = msgspec.json.encode(value)
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
        head += "".join(f"\r\n{name}: {one}" for name, one in headers.items())
        writer.write(head.encode() + b"\r\n\r\n" + raw)


def _choice(is_chat: bool, index: int, how: Behavior) -> dict[str, Any]:  # noqa: FBT001
    text = how.text * how.tokens
    what = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"index": index, "finish_reason": "stop", "logprobs": None, **what}


def _event(writer: asyncio.StreamWriter, value: object) -> None:
    _chunk(writer, b"data: " + msgspec.json.encode(value) + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, raw: bytes) -> None:
    writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
