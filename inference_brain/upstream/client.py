"""HTTP to replicas. One client for all of them; connections are kept and used again.

    async with client.open("POST", url, headers, body) as answer:
        while piece := await answer.piece():
            ...

To leave the context closes the connection of an answer that is not at its end, at once: so an engine
stops computing for a client that has left. pyreqwest reads ahead by default, up to 64 KiB, before it
shows the head of an answer; with that a stream is none, and cancelling does not reach the engine. Here
nothing is read before it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from pyreqwest.client import Client as HttpClient
from pyreqwest.client import ClientBuilder
from pyreqwest.exceptions import ConnectError, ConnectTimeoutError, PyreqwestError
from pyreqwest.response import Response

from telemetry.decoder import excerpt

IDLE_SECONDS: Final = 55.0  # a connection is kept; uvicorn in engines closes them after 5 to 75
WHOLE_BYTES_MAX: Final = 64 << 20  # of an answer that is not a stream


class UpstreamFailed(Exception):
    """A replica did not answer, or not to the end. A sentence without its address."""

    reason = "failed"  # as `brain_retries_total` counts it


class Unreachable(UpstreamFailed):
    """No connection: it has seen nothing of the request."""

    reason = "unreachable"


class Lost(UpstreamFailed):
    """The connection broke, or what came was no HTTP."""

    reason = "lost"


class Late(UpstreamFailed):
    """Nothing has come for too long."""

    reason = "late"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: until there is a connection, until an answer begins, between two pieces of it."""

    connect: float = 2.0
    first: float = 600.0
    between: float = 60.0


class Answer:
    """An answer that has begun."""

    __slots__ = ("_reader", "_response", "_timeouts", "status")

    def __init__(self, response: Response, timeouts: Timeouts) -> None:
        self.status = response.status
        self._response = response
        self._reader = response.body_reader
        self._timeouts = timeouts

    def header(self, name: str) -> str:
        return self._response.get_header(name) or ""

    async def piece(self, *, is_first: bool = False) -> bytes | None:
        """The next bytes, as they come; None at the end. Raises UpstreamFailed."""
        seconds = self._timeouts.first if is_first else self._timeouts.between
        try:
            async with asyncio.timeout(seconds):
                piece = await self._reader.read_chunk()
        except TimeoutError:
            raise Late(f"Nothing came from the replica for {seconds:g} s.") from None
        except PyreqwestError as error:
            raise Lost(f"The connection to the replica broke: {_why(error)}.") from None
        return None if piece is None else bytes(piece)

    async def whole(self, most: int = WHOLE_BYTES_MAX) -> bytes:
        """All of it. Raises UpstreamFailed, also where it is longer than allowed."""
        pieces: list[bytes] = []
        size = 0
        while (piece := await self.piece(is_first=not pieces)) is not None:
            pieces.append(piece)
            if (size := size + len(piece)) > most:
                raise Lost(f"The replica's answer has more than {most} bytes.")
        return b"".join(pieces)


class Client:
    """Connections to all replicas of a brain."""

    def __init__(self, timeouts: Timeouts | None = None, authorities: Path | None = None) -> None:
        """`authorities`: PEM, whom to believe beside those of the system. Raises OSError."""
        self.timeouts = timeouts or Timeouts()
        builder = (
            ClientBuilder()
            .no_proxy()
            .follow_redirects(enable=False)
            .gzip(enable=False)
            .brotli(enable=False)
            .zstd(enable=False)
            .deflate(enable=False)
            .user_agent("tidegate-brain")
            .connect_timeout(timedelta(seconds=self.timeouts.connect))
            .pool_idle_timeout(timedelta(seconds=IDLE_SECONDS))
            .pool_max_idle_per_host(256)
        )
        if authorities:
            builder = builder.add_root_certificate_pem(authorities.read_bytes())
        self._http: HttpClient = builder.build()

    async def close(self) -> None:
        await self._http.close()

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        seconds: float | None = None,
    ) -> AsyncIterator[Answer]:
        """Send a request; the answer once its head has come, within so many seconds. Raises
        UpstreamFailed."""
        request = self._http.request(method, url).headers(dict(headers)).streamed_read_buffer_limit(0)
        if body:
            request = request.body_bytes(body)
        sent = request.build_streamed()
        seconds = self.timeouts.first if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                response = await sent.__aenter__()
        except (ConnectError, ConnectTimeoutError) as error:
            raise Unreachable(f"No connection to the replica: {_why(error)}.") from None
        except TimeoutError:
            raise Late(f"The replica did not begin to answer for {seconds:g} s.") from None
        except PyreqwestError as error:
            raise Lost(f"The connection to the replica broke: {_why(error)}.") from None
        try:
            yield Answer(response, self.timeouts)
        finally:
            await sent.__aexit__(None, None, None)


def _why(error: PyreqwestError) -> str:
    """The innermost cause; the outer ones have the address in them."""
    causes = getattr(error, "details", {}).get("causes") or []
    return excerpt(causes[-1]["message"] if causes else type(error).__name__, 100)
