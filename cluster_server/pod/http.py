"""As much of an HTTP server as a runner needs: one request for each connection, small, without a
framework, since it is started before each manager."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import httptools

REQUEST_BYTES_MAX: Final = 64 << 10
READ_SECONDS_MAX: Final = 10.0
CONNECTIONS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    key: str  # of its bearer token
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes = b""


class _Parsed:
    def __init__(self) -> None:
        self.url = b""
        self.body = bytearray()
        self.headers: dict[str, str] = {}
        self.is_whole = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.is_whole = True


async def serve(port: int, answer: Callable[[Request], Awaitable[Answer]]) -> asyncio.Server:
    """On all addresses: those of a pod are its own. Raises OSError."""
    connections = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            if connections > CONNECTIONS_MAX:
                return
            async with asyncio.timeout(READ_SECONDS_MAX):
                request = await _read(reader)
            if request is None:
                return
            given = asyncio.ensure_future(answer(request))
            left = asyncio.ensure_future(reader.read(1))  # who leaves has no place any more
            await asyncio.wait([given, left], return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
            if not given.done():
                given.cancel()
                return
            _write(writer, given.result())
            await writer.drain()
        except (OSError, httptools.HttpParserError):
            pass  # the other side has gone, or speaks something else
        except asyncio.CancelledError:
            pass  # the runner ends; asyncio would print that into the log of the manager
        finally:
            connections -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(connected, port=port)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    parsed, count = _Parsed(), 0
    parser = httptools.HttpRequestParser(parsed)
    while not parsed.is_whole:
        piece = await reader.read(16 << 10)
        count += len(piece)
        if not piece or count > REQUEST_BYTES_MAX:
            return None
        parser.feed_data(piece)
    scheme, _, key = parsed.headers.get("authorization", "").partition(" ")
    return Request(
        parser.get_method().decode(),
        httptools.parse_url(parsed.url).path.decode(),
        key.strip() if scheme.lower() == "bearer" else "",
        bytes(parsed.body),
    )


def _write(writer: asyncio.StreamWriter, answer: Answer) -> None:
    status = HTTPStatus(answer.status)
    body = answer.body or status.phrase.encode()
    kind = "application/json" if answer.body else "text/plain"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
