"""One question to another process over HTTP, and its answer: bounded in all that the other decides.

    async with Exchange(trusted) as exchange:               # within `run`, or in a loop that is there
        reply = await exchange.ask("GET", f"{url}/v1/observed", token, Budget(5.0))
        observed = reply.read(Observed)                     # Malformed, unless it is one

A whole exchange has one deadline, from looking up the name to the last byte, so who sends a byte every
two seconds has as long as who sends none. A body is not received beyond its limit. Nothing is
decompressed: we ask for none, and refuse what comes compressed. Redirections and cookies are not
followed, proxies of the environment are not used: a token goes where its owner is known to be.
Whatever else comes is a `Reply`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from telemetry.decoder import ANSWER, Limits, Malformed, decode, excerpt
from telemetry.units import size

T = TypeVar("T")

AT_ONCE_MAX: Final = 128
SENTENCE_CHARACTERS_MAX: Final = 500
PORT_MAX: Final = (1 << 16) - 1
PLAIN: Final = ("", "identity")
# By OpenSSL's X509_V_ERR_…: expired; self-signed, or by who is not believed; another name.
_OTHERS: Final = "Its certificate is of another authority."
_VERIFIED: Final = {
    10: "Its certificate has expired.",
    18: _OTHERS,
    19: _OTHERS,
    20: _OTHERS,
    62: "Its certificate is of another process: another key than the one that has joined.",
}
COMPRESSED: Final = "Its answer is compressed, which nobody asked for."


class Fault(StrEnum):
    """In what way an answer is none."""

    UNREACHED = "unreached"
    UNTRUSTED = "untrusted"  # its certificate is not the one that it should have
    BROKEN = "broken"  # not HTTP, or not all of it
    LATE = "late"
    TOO_LONG = "too_long"
    COMPRESSED = "compressed"
    MALFORMED = "malformed"
    REFUSED = "refused"  # a status that says no
    FAILED = "failed"  # on our side


class Unanswered(Exception):
    """Why there is no answer, in a sentence."""

    def __init__(self, fault: Fault, sentence: str) -> None:
        super().__init__(excerpt(sentence, SENTENCE_CHARACTERS_MAX))
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Budget:
    """`seconds`: for all of an exchange. `bytes_max`: of the body of an answer."""

    seconds: float
    bytes_max: int = ANSWER.bytes_max


class _Problem(msgspec.Struct):
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that has arrived whole. Names are those of httpx's responses."""

    status_code: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    def read(self, kind: type[T] | msgspec.json.Decoder[T], limits: Limits = ANSWER) -> T:
        """What it says, typed. Raises Malformed."""
        return decode(self.content, kind, limits)

    @property
    def refusal(self) -> str:
        """What it says against it, in a sentence."""
        if 300 <= self.status_code < 400:
            return f"It answered {self.status_code}. Redirections are not followed."
        try:
            detail = self.read(_Problem).detail
        except Malformed:
            detail = ""
        return excerpt(f"It answered {self.status_code}. {detail}".strip(), SENTENCE_CHARACTERS_MAX)


class _Resolvers(ThreadPoolExecutor):
    """Names are looked up in threads that nothing can end, and whose end nobody waits for."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001
        del wait, cancel_futures
        super().shutdown(wait=False, cancel_futures=True)


def run(asking: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`; but names that are still being looked up when it is done are left alone."""

    async def main() -> T:
        asyncio.get_running_loop().set_default_executor(_Resolvers(AT_ONCE_MAX, "resolver"))
        return await asking

    return asyncio.run(main())


class Exchange:
    """A connection for each question, at most `AT_ONCE_MAX` at a time. `trusted`: whose certificates are
    believed, and which one is shown."""

    def __init__(self, trusted: ssl.SSLContext) -> None:
        limits = httpx.Limits(max_connections=AT_ONCE_MAX, max_keepalive_connections=0)
        self._transport = httpx.AsyncHTTPTransport(verify=trusted, limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._transport.__aexit__(kind, error, trace)

    async def ask(
        self,
        method: str,
        url: str,
        token: str,
        budget: Budget,
        content: bytes | None = None,
        *,
        server_name: str = "",
    ) -> Reply:
        """Raises Unanswered, and nothing else, whatever the other does. `server_name`: whose certificate
        it has to show, where that is not the host of the address."""
        try:
            async with asyncio.timeout(budget.seconds):
                return await self._asked(
                    _request(method, url, token, content, server_name), budget.bytes_max
                )
        except TimeoutError:
            raise Unanswered(Fault.LATE, f"It has not answered within {budget.seconds:g} s.") from None
        except httpx.InvalidURL as error:
            raise Unanswered(Fault.UNREACHED, f"Its address is invalid: {error}.") from None
        except httpx.RemoteProtocolError as error:
            raise Unanswered(
                Fault.BROKEN, f"The connection broke, or it does not speak HTTP: {error}."
            ) from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            # A host name that can't be encoded, or that no certificate has, is a ValueError.
            raise unreached(error) from None

    async def _asked(self, request: httpx.Request, bytes_max: int) -> Reply:
        answer = await self._transport.handle_async_request(request)
        try:
            if answer.headers.get("content-encoding", "").strip().lower() not in PLAIN:
                raise Unanswered(Fault.COMPRESSED, COMPRESSED)
            return Reply(answer.status_code, await _body(answer, bytes_max))
        finally:
            await answer.aclose()


def unreached(error: Exception) -> Unanswered:
    """What went wrong on the way to it, its certificate included."""
    if distrust := _distrust(error):
        return Unanswered(Fault.UNTRUSTED, distrust)
    return Unanswered(Fault.UNREACHED, f"It does not answer: {str(error) or type(error).__name__}.")


def _distrust(error: BaseException) -> str:
    """In a sentence, why its certificate was not believed; nothing if that is not why."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLCertVerificationError):
        found = found.__cause__ or found.__context__
    if found is None:
        return ""
    return _VERIFIED.get(found.verify_code, f"It is not believed: {found.verify_message}.")


def too_long(bytes_max: int, told: str = "") -> Unanswered:
    """An answer of which more came than is read. `told`: the length that it announced, if it did."""
    most = f"at most {size(bytes_max)} is read."
    if told.isdecimal():
        return Unanswered(Fault.TOO_LONG, f"Its answer has {size(int(told[:18]))}; {most}")
    return Unanswered(Fault.TOO_LONG, f"Its answer is longer than what is read of it: {most}")


def _request(
    method: str, url: str, token: str, content: bytes | None, server_name: str
) -> httpx.Request:
    headers = {
        "Authorization": f"Bearer {token}",
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "User-Agent": "Tidegate",
    }
    if content is not None:
        headers["Content-Type"] = "application/json"
    extensions = {"sni_hostname": server_name} if server_name else {}
    request = httpx.Request(method, url, headers=headers, content=content, extensions=extensions)
    port = request.url.port
    if port is not None and not 0 < port <= PORT_MAX:  # httpx says so as an ExceptionGroup
        raise httpx.InvalidURL(f"there is no port {port}")
    return request


async def _body(answer: httpx.Response, bytes_max: int) -> bytes:
    """As it comes over the wire."""
    pieces, received, told = list[bytes](), 0, answer.headers.get("content-length", "")
    if told.isdecimal() and int(told[:18]) > bytes_max:
        raise too_long(bytes_max, told)
    async for piece in answer.aiter_raw():
        received += len(piece)
        if received > bytes_max:
            raise too_long(bytes_max)
        pieces.append(piece)
    return b"".join(pieces)
