"""The way of requests to the engine: OpenAI's API on a port, passed on as it comes.

Requests have to carry the instance's key as a bearer, except for `/health`, of which the engine learns
no more than that somebody asks. An answer is passed on piece by piece; a client that leaves takes its
request away from the engine. Thin: only heads are parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import msgspec

from kvss_agent.http.client import Client, Late, Unreachable, UpstreamFailed
from kvss_agent.http.extension import EXTENSION
from kvss_agent.http.server import HttpBounds, HttpConnection, HttpPolicy
from kvss_agent.limits.admission import Places

log = logging.getLogger(__name__)

OWNER: Final = "brain"  # of connections that have shown the key
BODY_BYTES_MAX: Final = 64 << 20
ANSWER_SECONDS: Final = 24 * 3600.0
CONNECTIONS_MAX: Final = 8192
STRANGERS_MAX: Final = 64
IDLE_SECONDS: Final = 75  # longer than brains keep theirs
HEALTH: Final = "/health"
HEALTH_METHODS: Final = ("GET", "HEAD")
METRICS: Final = "/metrics"
PREFIXES: Final = ("/v1/", "/tokenize", "/detokenize")
# Of one connection, and so not passed on; and what is said anew.
_NOT_ON: Final = frozenset(
    {
        *(
            b"connection",
            b"keep-alive",
            b"proxy-authenticate",
            b"proxy-authorization",
            b"te",
            b"trailer",
        ),
        *(b"transfer-encoding", b"upgrade", b"authorization", b"host", b"content-length", b"expect"),
    }
)
_NOT_BACK: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"upgrade"})

Scope: TypeAlias = Any
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]


def policy() -> HttpPolicy:
    """Bounds for a server whose clients are brains."""
    bounds = HttpBounds(request_seconds=ANSWER_SECONDS, idle_seconds=IDLE_SECONDS)
    places = Places(STRANGERS_MAX, STRANGERS_MAX, CONNECTIONS_MAX, CONNECTIONS_MAX // 2)
    return HttpPolicy(bounds, places, owners=lambda: [OWNER])


class Refusal(Exception):
    """An answer of ours, in OpenAI's form."""

    def __init__(self, status: HTTPStatus, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code


class Proxy:
    """An ASGI application. `client` goes to the engine that runs; `why_not` tells clients why none takes
    requests. Both may change at any time."""

    def __init__(self, api_key: str, on_change: Callable[[int], None]) -> None:
        """`on_change` is called with how many requests run."""
        self.client: Client | None = None
        self.origin = ""
        self.why_not = "The engine has not been started yet."
        self.running = 0
        self.passed = 0  # since the start
        self.failed = 0  # of those, at the engine
        self._works: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()  # of these, those that were broken off
        self._key = f"Bearer {api_key}".encode() if api_key else b""
        self._on_change = on_change

    def point_at(self, client: Client, origin: str) -> None:
        self.client, self.origin = client, origin

    def point_nowhere(self, why: str) -> None:
        """Requests that run are not touched. Clients read `why`, also those without a key: it has
        nothing that an engine has logged, which may be a prompt of somebody else."""
        self.client, self.why_not = None, why

    def cut_off(self) -> None:
        """Break off the requests that run: the engine is about to end, and need not finish them."""
        for work in self._works - self._cut:
            self._cut.add(work)
            work.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self._check(scope)
            client = self._there()
            body = b"" if scope["path"] == HEALTH else await _body(receive)
        except Refusal as refusal:
            await _refuse(send, refusal)
            return
        except _Left:
            return
        is_counted = scope["path"] not in (HEALTH, METRICS)
        self._count(is_counted)
        try:
            await self._pass_on(client, scope, body, receive, send)
        finally:
            self._count(-is_counted)

    def _there(self) -> Client:
        """Raises Refusal."""
        if self.client is None:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "not_ready", self.why_not)
        return self.client

    def _count(self, change: int) -> None:
        if change:
            self.running += change
            self.passed += change > 0
            self._on_change(self.running)

    def _check(self, scope: Scope) -> None:
        """Raises Refusal."""
        path: str = scope["path"]
        if path == HEALTH:
            _check_health(scope)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if self._key and not hmac.compare_digest(given, self._key):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED, "invalid_api_key", "The key of this instance is required."
            )
        connection = scope.get("extensions", {}).get(EXTENSION)
        if isinstance(connection, HttpConnection) and not connection.prove(OWNER):
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", "Too many connections."
            )
        if path != METRICS and not path.startswith(PREFIXES):
            raise Refusal(HTTPStatus.NOT_FOUND, "not_found", "There is no such path.")

    async def _pass_on(
        self, client: Client, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Until the answer is passed on, the client leaves, or it is cut off."""
        work = asyncio.current_task()
        assert work  # noqa: S101 - servers have one for each request
        has_left = has_begun = False

        async def watch() -> None:
            nonlocal has_left
            while (await receive())["type"] != "http.disconnect":
                pass
            has_left = True
            work.cancel()

        async def passing(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        watching = asyncio.create_task(watch())
        self._works.add(work)
        try:
            await self._ask(client, scope, body, passing)
        except asyncio.CancelledError:
            if not has_left and work not in self._cut:
                raise
            work.uncancel()
            if has_left:
                return
            if has_begun:
                _break_off(scope)
            else:
                await _refuse(send, Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "not_ready", self.why_not))
        finally:
            watching.cancel()
            self._works.discard(work)
            self._cut.discard(work)

    async def _ask(self, client: Client, scope: Scope, body: bytes, send: Send) -> None:
        query: bytes = scope["query_string"]
        target = scope["raw_path"].decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name not in _NOT_ON
        }
        method = scope["method"]
        if scope["path"] == HEALTH:  # without a key
            method, target, headers = "GET", HEALTH, {}
        if not body and method not in ("GET", "HEAD", "DELETE"):
            headers["content-length"] = "0"
        has_begun = False
        try:
            async with client.open(method, self.origin + target, headers, body) as answer:
                passed = [item for item in answer.headers if item[0] not in _NOT_BACK]
                await send({"type": "http.response.start", "status": answer.status, "headers": passed})
                has_begun = True
                while (piece := await answer.piece()) is not None:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamFailed as failure:
            self.failed += 1
            if has_begun:
                _break_off(scope)  # so that nobody takes it for the whole answer
                return
            is_late = isinstance(failure, Late)
            status = HTTPStatus.GATEWAY_TIMEOUT if is_late else HTTPStatus.BAD_GATEWAY
            if isinstance(failure, Unreachable):
                status = HTTPStatus.SERVICE_UNAVAILABLE
            await _refuse(
                send, Refusal(status, f"engine_{failure.reason}", "The engine does not answer.")
            )


class _Left(Exception):
    """The client is gone before its request was whole."""


def _check_health(scope: Scope) -> None:
    """Strangers may ask it, and no more. Nothing is read. Raises Refusal."""
    if scope["method"] not in HEALTH_METHODS:
        raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", f"Use GET for {HEALTH}.")
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_long", f"{HEALTH} takes no body.")


async def _body(receive: Receive) -> bytes:
    """Raises _Left, and Refusal where it is too long."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Left
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > BODY_BYTES_MAX:
            sentence = f"The body may have at most {BODY_BYTES_MAX} bytes."
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_long", sentence)
        pieces.append(piece)
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _refuse(send: Send, refusal: Refusal) -> None:
    kind = (
        "server_error" if refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    )
    error = {"message": str(refusal), "type": kind, "code": refusal.code}
    body = msgspec.json.encode({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"1"))
    if refusal.status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append((b"allow", ", ".join(HEALTH_METHODS).encode()))
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": int(refusal.status), "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _break_off(scope: Scope) -> None:
    connection = scope.get("extensions", {}).get(EXTENSION)
    if isinstance(connection, HttpConnection) and connection.transport:
        connection.transport.abort()
