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
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx

from kvss_agent.http.answers import (
    AT_ONCE_MAX,
    COMPRESSED,
    PLAIN,
    Budget,
    Fault,
    Reply,
    Unanswered,
    too_long,
    unreached,
)

T = TypeVar("T")

PORT_MAX: Final = (1 << 16) - 1


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
