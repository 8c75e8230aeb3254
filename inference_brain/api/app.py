"""OpenAI's API as an ASGI application: routes, keys, errors, names of requests, the access log."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec

from inference_brain import metrics
from inference_brain.api import errors, requests
from inference_brain.api.errors import ApiError
from inference_brain.api.exchange import (
    END_BYTES,
    ClientLeft,
    ClientTooSlow,
    Exchange,
    Header,
    Receive,
    Scope,
    Send,
)
from inference_brain.api.keys import Callers, owner_of
from inference_brain.api.requests import Generation
from inference_brain.api.starts import Starts
from inference_brain.api.tracing import client_id, new_id, trace_headers
from inference_brain.asking import Asking
from inference_brain.body_room import BodyRoom
from inference_brain.counts import Counts
from inference_brain.desired import OrgSpec, ServedModel
from inference_brain.journey import Journey, Records
from inference_brain.outbound import Claims
from inference_brain.router import Router

log = logging.getLogger(__name__)
access = logging.getLogger("inference_brain.access")

DEADLINE: Final = b"x-tidegate-deadline-seconds"
BODY_SECONDS: Final = 60.0
LONG_BYTES: Final = 16 << 10  # of a body: what others wait for is mostly its length
HEADER_BYTES_MAX: Final = 64 << 10
_PLAIN: Final = "/:"  # in a path as it is logged: a blank would begin another field


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes: of one body, and of all bodies at once."""

    body_bytes_max: int = 32 << 20
    bodies_bytes_max: int = 2 << 30


@dataclass(slots=True)
class Line:
    """What the access log says of a request. Nothing of its prompt or answer."""

    request: str
    client: str
    started: float
    org: str = ""
    model: str = ""
    journey: Journey | None = None
    headers: list[Header] = field(default_factory=list)


Handler = Callable[[Exchange, OrgSpec, Line], Awaitable[None]]


class Carrier(Protocol):
    """Brings requests that have their place to replicas, and answers back."""

    async def serve(self, exchange: Exchange, journey: Journey, headers: Sequence[Header]) -> None:
        """Raises ApiError if nothing has been answered yet, and ClientLeft. The journey has its end
        afterwards."""


class Api:
    """The application. `callers` is replaced with each desired document."""

    def __init__(
        self,
        router: Router,
        carrier: Carrier,
        counts: Counts,
        records: Records,
        bounds: Bounds,
        client_seconds: float,
        room: BodyRoom,
        starts: Starts,
        *,
        logs_access: bool = True,
        trusted_org: str = "",
    ) -> None:
        """`client_seconds`: see `Exchange`. `room`, `starts`: of all listeners of this loop.
        `trusted_org`: whose requests those without a key are: for a listener that only a trusted network
        reaches."""
        self.callers: Callers | None = None
        self.room = room
        self.router = router
        self._carrier = carrier
        self._counts = counts
        self._records = records
        self._bounds = bounds
        self._client_seconds = client_seconds
        self._logs_access = logs_access
        self._trusted_org = trusted_org
        self._claims = Claims()
        self._starts = starts
        self._clock = time.monotonic
        self._posts: dict[str, Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/detokenize": self._detokenize,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self.room, self._client_seconds)
        line = Line(new_id(), client_id(exchange), self._clock())
        line.headers.append((b"x-request-id", line.request.encode()))
        try:
            await self._answer(exchange, line)
        except ApiError as error:
            await self._fail(exchange, line, error)
        except ClientLeft as error:
            exchange.status = 499
            if isinstance(error, ClientTooSlow):
                await exchange.abort()
        except asyncio.CancelledError:
            exchange.status = 499
            raise
        except Exception:
            log.exception("Request %s failed with an internal error", line.request)
            await self._fail(exchange, line, errors.internal(line.request))
        finally:
            exchange.give_back()
            self._log(exchange, line)

    async def _fail(self, exchange: Exchange, line: Line, error: ApiError) -> None:
        if line.journey is None and line.org:
            result = "rejected" if error.status in (429, 503) else "invalid"
            result = result if error.status != 500 else "error"
            self._counts.add(metrics.REQUESTS, line.org, line.model, result)
        if exchange.has_begun:
            return
        try:
            await exchange.fail(error, line.headers)
        except (ClientLeft, OSError):
            exchange.status = 499

    async def _answer(self, exchange: Exchange, line: Line) -> None:
        path = exchange.path.rstrip("/") or "/"
        if path in ("/health", "/-/health"):
            status, body = (200, b"{}") if self.callers else (503, b'{"detail":"no document yet"}')
            await exchange.answer(status, body, line.headers)
            return
        org = self._org(exchange)
        line.org = exchange.org = org.name
        await exchange.prove(owner_of(org))
        if handler := self._posts.get(path):
            if exchange.method != "POST":
                raise errors.wrong_method("POST")
            await handler(exchange, org, line)
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            if exchange.method != "GET":
                raise errors.wrong_method("GET")
            await self._models(exchange, org, path.removeprefix("/v1/models").lstrip("/"), line)
        else:
            raise errors.no_such_route(exchange.method, exchange.path)

    def _org(self, exchange: Exchange) -> OrgSpec:
        """Before that no byte of a body is read. Raises ApiError."""
        callers = self._known()
        authorization = exchange.header(b"authorization")
        if self._trusted_org and not authorization:
            found = callers.org(self._trusted_org)
            if found is None:
                raise errors.unavailable("The listener's org is not served.", "no_org", 5)
            return found
        return callers.of_key(authorization)

    def whose(self, authorization: str) -> str:
        """The org of a header whose key is valid now; empty if it is not."""
        try:
            return self._known().of_key(authorization).name
        except ApiError:
            return ""

    def _known(self) -> Callers:
        if self.callers is None:
            raise errors.unavailable("The brain has no desired document yet.", "no_document", 5)
        return self.callers

    def _model(self, org: OrgSpec, name: str, line: Line) -> ServedModel:
        found = self._known().model(org, name)
        line.model = found.name
        return found

    async def _body(self, exchange: Exchange) -> bytes:
        """All of it, and of a long one when it is its turn. What it becomes when it is decoded is taken
        from the same room. Raises ApiError, ClientLeft."""
        raw = bytes(await exchange.body(self._bounds.body_bytes_max, BODY_SECONDS))
        if len(raw) > LONG_BYTES:
            await self._starts.turn(exchange.org)
            if exchange.has_left:  # meanwhile; `watched` would not learn of it
                raise ClientLeft
        more = requests.memory_of(raw)
        if not self.room.is_enough(exchange.held + more):
            raise errors.takes_too_much()
        exchange.take(more)
        return raw

    # Routes

    async def _models(self, exchange: Exchange, org: OrgSpec, name: str, line: Line) -> None:
        if name:
            await _answer_json(exchange, _shown(self._model(org, name, line)), line.headers)
            return
        shown = [_shown(model) for model in self._known().models(org).values()]
        await _answer_json(exchange, {"object": "list", "data": shown}, line.headers)

    async def _chat(self, exchange: Exchange, org: OrgSpec, line: Line) -> None:
        raw = await self._body(exchange)
        await self._generate(exchange, org, line, requests.chat(raw))

    async def _completion(self, exchange: Exchange, org: OrgSpec, line: Line) -> None:
        raw = await self._body(exchange)
        await self._generate(exchange, org, line, requests.completion(raw))

    async def _generate(self, exchange: Exchange, org: OrgSpec, line: Line, request: Generation) -> None:
        with exchange.watched():
            journey = await self._begin(exchange, org, line, request)
            line.journey = journey
            self._records.begin(journey)
            try:
                await self._carrier.serve(exchange, journey, line.headers)
            finally:
                self._records.end(journey)

    async def _begin(self, exchange: Exchange, org: OrgSpec, line: Line, request: Generation) -> Journey:
        """Up to its place. Raises ApiError."""
        asking = Asking(
            line.request,
            org,
            self._model(org, request.model, line),
            request,
            line.started,
            time.time(),
            _deadline(exchange),
        )
        await self.router.prepare(asking)
        place = await self.router.enter(asking)
        later = asyncio.get_running_loop().call_later
        return Journey(asking, place, self.router, self._claims, trace_headers(exchange), later)

    async def _tokenize(self, exchange: Exchange, org: OrgSpec, line: Line) -> None:
        await _answer_json(exchange, await self._tokenized(exchange, org, line), line.headers)

    async def _tokenized(self, exchange: Exchange, org: OrgSpec, line: Line) -> dict[str, Any]:
        request = requests.tokenize(await self._body(exchange))
        model = self._model(org, self._named(request.model, org), line)
        ids = await self.router.prompts.count(org.name, model, request)
        if ids is None:
            raise errors.invalid("This model's prompts can't be tokenized here.", "model")
        told: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": model.tokens_max,
            "tokens": list(ids),
            "token_strs": None,
        }
        if request.return_token_strs:
            told["token_strs"] = await self.router.prompts.texts(org.name, model, ids)
        return told

    async def _detokenize(self, exchange: Exchange, org: OrgSpec, line: Line) -> None:
        request = requests.detokenize(await self._body(exchange))
        model = self._model(org, self._named(request.model, org), line)
        if len(request.tokens) > model.tokens_max:
            raise errors.too_long(len(request.tokens), 0, model.tokens_max, "tokens")
        text = await self.router.prompts.decode(org.name, model, request.tokens)
        if text is None:
            raise errors.invalid("This model's tokens are not known here.", "model")
        await _answer_json(exchange, {"prompt": text}, line.headers)

    def _named(self, name: str | None, org: OrgSpec) -> str:
        """The model that is meant: the only one, if none is named."""
        models = self._known().models(org)
        if name is None and len(models) == 1:
            return next(iter(models))
        if name is None:
            raise errors.invalid("Missing required parameter: 'model'.", "model")
        return name

    # The access log

    def _log(self, exchange: Exchange, line: Line) -> None:
        if not self._logs_access:
            return
        journey = line.journey
        usage = journey.usage if journey else None
        replica = journey.replica if journey else None
        access.info(
            "%s %s %d request=%s client=%s org=%s model=%s replica=%s result=%s attempts=%d "
            "prompt_tokens=%s cached_tokens=%s completion_tokens=%s seconds=%.4f",
            exchange.method,
            quote(exchange.path[:200], _PLAIN),
            exchange.status,
            line.request,
            line.client or "-",
            line.org or "-",
            line.model or "-",
            replica.name if replica else "-",
            journey.result if journey else "-",
            journey.attempts if journey else 0,
            usage.prompt_tokens if usage else "-",
            usage.cached_tokens if usage else "-",
            usage.completion_tokens if usage else "-",
            self._clock() - line.started,
        )


async def _answer_json(exchange: Exchange, value: Any, headers: Sequence[Header]) -> None:
    raw = msgspec.json.encode(value)
    del value  # it is larger, and the client may take long
    if len(raw) <= END_BYTES:
        await exchange.answer(200, raw, headers)
        return
    exchange.take(len(raw))
    with exchange.watched():
        await exchange.answer(200, raw, headers)


def _shown(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "tidegate",
        "max_model_len": model.tokens_max,
    }


def _deadline(exchange: Exchange) -> float | None:
    """Seconds until which the first token is of use. Raises ApiError."""
    text = exchange.header(DEADLINE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise errors.invalid(f"The header {DEADLINE.decode()} is a number of seconds above 0.")
    return seconds
