"""What the control APIs of agents and drivers share: who may ask, how much, and how they refuse.

Answers are JSON; refusals are problem details (RFC 9457) with a sentence.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

BODY_BYTES_MAX: Final = 8 << 20

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Invalid(Exception):
    """One sentence for everything that is wrong."""


def guarded(
    handler: Handler, may: Callable[[Request], bool], refusals: Mapping[type[Exception], HTTPStatus]
) -> Handler:
    """The handler for those who may; what it raises becomes the status that `refusals` says."""

    async def answer(request: Request) -> Response:
        if not may(request):
            return problem(HTTPStatus.UNAUTHORIZED, "A token is needed, as a bearer.")
        try:
            return await handler(request)
        except Refused as error:
            return problem(error.status, str(error))
        except (Invalid, ValueError) as error:
            return problem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except tuple(refusals) as error:
            status = next(status for kind, status in refusals.items() if isinstance(error, kind))
            return problem(status, str(error))

    return answer


def bearer(request: Request) -> str:
    """The token that comes along; empty if there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def is_token(given: str, expected: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


async def body_of(request: Request, most: int = BODY_BYTES_MAX) -> bytes:
    """The body, if it is not too long. It is not read further than that."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A body has at most {most} bytes.")
    return bytes(body)


def decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise Invalid(str(error)) from error


def as_json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def problem(status: HTTPStatus, detail: str) -> Response:
    body = msgspec.json.encode({"title": status.phrase, "status": status, "detail": detail})
    headers = {"www-authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    return Response(body, status, headers, media_type="application/problem+json")


async def http_error(_request: Request, error: Exception) -> Response:
    status = HTTPStatus(error.status_code if isinstance(error, HTTPException) else 500)
    return problem(
        status, "There is nothing here." if status == HTTPStatus.NOT_FOUND else status.description
    )


async def failure(_request: Request, _error: Exception) -> Response:
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "This has failed inside; the log tells more.")
