"""What the control APIs of agents and drivers share: who may ask, how much, and how they refuse.

Answers are JSON; refusals are problem details (RFC 9457) with a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from kvss_agent.documents import Conflict, Invalid
from kvss_agent.http.extension import EXTENSION
from kvss_agent.http.server import HttpConnection
from kvss_agent.memory import unwritten

BODY_BYTES_MAX: Final = 8 << 20
SMALL_BYTES: Final = 64 << 10  # put together from pieces sooner than memory of their own is taken
RETRY_SECONDS: Final = 5
CONTROLLER: Final = "controller"  # whose connections those with the control token are

Handler = Callable[[Request], Awaitable[Response]]
OwnerOf = Callable[[Request], str | None]


class Refused(Exception):
    """`retry_seconds`: after which asking again may help."""

    def __init__(self, status: HTTPStatus, detail: str, retry_seconds: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.retry_seconds = retry_seconds


def guarded(
    handler: Handler,
    owner_of: OwnerOf,
    refusals: Mapping[type[Exception], HTTPStatus] = MappingProxyType({}),
) -> Handler:
    """The handler for those who may; what else it raises becomes the status that `refusals` says.

    `owner_of`: who asks, by the request's headers alone; None for who may not, or Refused. Before that
    no byte of a body is read. Whose connection it is counts as proven from here on.
    """

    async def answer(request: Request) -> Response:
        try:
            owner = owner_of(request)
        except Refused as error:
            return problem(error.status, str(error), retry_seconds=error.retry_seconds)
        if owner is None:
            return problem(HTTPStatus.UNAUTHORIZED, "A bearer token is required.")
        connection = connection_of(request.scope)
        if connection and not connection.prove(owner):
            return problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "Too many connections with this token: close some, or use them again.",
                retry_seconds=RETRY_SECONDS,
                close=True,
            )
        if connection:
            await connection.turn()
        try:
            return await handler(request)
        except Refused as error:
            return problem(error.status, str(error), retry_seconds=error.retry_seconds)
        except ClientDisconnect:
            return problem(HTTPStatus.BAD_REQUEST, "The connection ended before the body did.")
        except (Invalid, ValueError) as error:
            return problem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except Conflict as error:
            return problem(HTTPStatus.CONFLICT, str(error))
        except tuple(refusals) as error:
            status = next(status for kind, status in refusals.items() if isinstance(error, kind))
            return problem(status, str(error))

    return answer


def connection_of(scope: Scope) -> HttpConnection | None:
    """None where another server than ours asks, as in tests."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, HttpConnection) else None


def bearer(request: Request) -> str:
    """The token that comes along; empty if there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def is_token(given: str, expected: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


async def body_of(request: Request, most: int = BODY_BYTES_MAX) -> bytes:
    """The body, if it is not too long. It is not read further than that; not at all if it says that it
    is longer."""
    announced = announced_bytes(request)
    if announced is not None and announced > most:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body may have at most {most} bytes.")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body may have at most {most} bytes."
            )
    return bytes(body)


@contextlib.asynccontextmanager
async def large_body_of(request: Request, most: int) -> AsyncIterator[memoryview]:
    """The same for what may be large: it is not put together from pieces, and its memory is taken as it
    comes. To give that back takes milliseconds, which others need not wait for."""
    announced = announced_bytes(request)
    if announced is None or announced <= SMALL_BYTES:
        yield memoryview(await body_of(request, most))
        return
    if announced > most:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body may have at most {most} bytes.")
    place, at = unwritten(announced), 0
    try:
        if connection := connection_of(request.scope):
            connection.receive_into(request.scope, place)
        async for piece in request.stream():
            place[at : at + len(piece)] = piece
            at += len(piece)
        yield place
    finally:
        loop, held = asyncio.get_running_loop(), [place]
        del place
        loop.call_soon(loop.run_in_executor, None, held.clear)  # when nobody else holds it any more


def announced_bytes(request: Request) -> int | None:
    """How long its body says that it is; None for as long as it goes on. The server has refused what is
    no number."""
    if "transfer-encoding" in request.headers:
        return None
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def as_json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def problem(
    status: HTTPStatus, detail: str, *, retry_seconds: int | None = None, close: bool = False
) -> Response:
    body = msgspec.json.encode({"title": status.phrase, "status": status, "detail": detail})
    headers = {"www-authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
    if retry_seconds is not None:
        headers["retry-after"] = str(retry_seconds)
    if close:
        headers["connection"] = "close"
    return Response(body, status, headers, media_type="application/problem+json")
