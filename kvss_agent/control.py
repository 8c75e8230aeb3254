"""The control API of an agent, over HTTP: what it should be, what it is, and a few verbs.

Everything but `/-/health` asks for `Authorization: Bearer <token>`. Answers are JSON; refusals are
problem details (RFC 9457) with a sentence.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvss_agent import metrics
from kvss_agent.agent import Agent, Conflict, Unknown
from kvss_agent.core import SLOTS_MAX
from kvss_agent.desired import HEX_16, Document, Invalid, Name
from kvss_agent.pulling import Pull
from kvss_agent.tier2.backend import Failed
from telemetry.exposition import CONTENT_TYPE

BODY_BYTES_MAX: Final = 8 << 20
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class PullRequest(Document, frozen=True, rename={"from_": "from", "as_": "as"}):
    """Fetch these slots of `shard` from the agent at `from`, in the name of the peer `as`."""

    from_: str
    shard: Name
    as_: Name
    slots: Annotated[list[Annotated[int, Meta(ge=0, lt=SLOTS_MAX)]], Meta(min_length=1)]
    after: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0


class PurgeRequest(Document, frozen=True):
    """What tier 2 is emptied of: a tag, a namespace, or a tag in a namespace; in hex."""

    tag: Annotated[str, Meta(pattern=HEX_16)] | None = None
    namespace: Annotated[str, Meta(pattern=HEX_16)] | None = None


_PULL: Final = msgspec.json.Decoder(PullRequest)
_PURGE: Final = msgspec.json.Decoder(PurgeRequest)


class Refused(Exception):
    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Control:
    """The routes, over one agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def application(self) -> Starlette:
        def route(path: str, handler: Handler, method: str = "GET") -> Route:
            return Route(path, self._guarded(handler), methods=[method])

        return Starlette(
            routes=[
                Route("/-/health", self.health),
                route("/metrics", self.metrics),
                route("/v1/desired", self.set_desired, "PUT"),
                route("/v1/observed", self.observed),
                route("/v1/shards/{name}", self.shard),
                route("/v1/shards/{name}/pull", self.pull, "POST"),
                route("/v1/pulls", self.list_pulls),
                route("/v1/pulls/{id}", self.get_pull),
                route("/v1/pulls/{id}", self.cancel_pull, "DELETE"),
                route("/v1/purge", self.purge, "POST"),
                route("/v1/drain", self.drain, "POST"),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _failure},
        )

    # Reading

    async def health(self, _request: Request) -> Response:
        """Alive, and whether all that was asked for is there. Says nothing that is worth a token."""
        ready = self.agent.is_ready
        return _json({"live": True, "ready": ready}, 200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        text = await asyncio.to_thread(metrics.page, self.agent)
        return Response(text, media_type=CONTENT_TYPE)

    async def observed(self, _request: Request) -> Response:
        return _json(self.agent.observed())

    async def shard(self, request: Request) -> Response:
        name = request.path_params["name"]
        answer = self.agent.shard(name)
        if hosted := self.agent.shards.get(name):
            answer["occupied_slots"] = await asyncio.to_thread(hosted.occupied)
        return _json(answer)

    async def list_pulls(self, _request: Request) -> Response:
        return _json([_pull(pull) for pull in self.agent.pulls.values()])

    async def get_pull(self, request: Request) -> Response:
        return _json(_pull(self._pull(request)))

    # Changing

    async def set_desired(self, request: Request) -> Response:
        told = await self.agent.set_desired(await _body(request))
        return _json({"generation": told.generation}, 202)

    async def pull(self, request: Request) -> Response:
        asked = _decode(await _body(request), _PULL)
        begun = self.agent.pull(
            request.path_params["name"], asked.from_, asked.shard, asked.as_, asked.after, asked.slots
        )
        return _json(_pull(begun), 202)

    async def cancel_pull(self, request: Request) -> Response:
        pull = self._pull(request)
        pull.cancel()
        return _json(_pull(pull), 202)

    async def purge(self, request: Request) -> Response:
        asked = _decode(await _body(request), _PURGE)
        receipt = await self.agent.purge(
            tag=bytes.fromhex(asked.tag) if asked.tag else None,
            namespace=bytes.fromhex(asked.namespace) if asked.namespace else None,
        )
        return _json(receipt)

    async def drain(self, _request: Request) -> Response:
        self.agent.drain()
        return _json({"draining": True, "connections": self.agent.plane.connections}, 202)

    # Inside

    def _pull(self, request: Request) -> Pull:
        pull = self.agent.pulls.get(request.path_params["id"])
        if pull is None:
            raise Unknown("There is no such pull; the last few hundred are kept.")
        return pull

    def _guarded(self, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            if not self._may(request):
                return _problem(
                    HTTPStatus.UNAUTHORIZED, "The token of this agent is needed, as a bearer."
                )
            try:
                return await handler(request)
            except Refused as error:
                return _problem(error.status, str(error))
            except (Invalid, ValueError) as error:
                return _problem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            except Conflict as error:
                return _problem(HTTPStatus.CONFLICT, str(error))
            except Unknown as error:
                return _problem(HTTPStatus.NOT_FOUND, str(error))
            except Failed as error:
                return _problem(HTTPStatus.BAD_GATEWAY, f"Tier 2 has failed: {error}")

        return answer

    def _may(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        expected = self.agent.settings.token
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), expected.encode())


async def _body(request: Request) -> bytes:
    """The body, if it is not too long. It is not read further than that."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A body has at most {BODY_BYTES_MAX} bytes."
            )
    return bytes(body)


def _decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise Invalid(str(error)) from error


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _problem(status: HTTPStatus, detail: str) -> Response:
    body = msgspec.json.encode({"title": status.phrase, "status": status, "detail": detail})
    headers = {"www-authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    return Response(body, status, headers, media_type="application/problem+json")


async def _http_error(_request: Request, error: Exception) -> Response:
    status = HTTPStatus(error.status_code if isinstance(error, HTTPException) else 500)
    return _problem(
        status, "There is nothing here." if status == HTTPStatus.NOT_FOUND else status.description
    )


async def _failure(_request: Request, _error: Exception) -> Response:
    return _problem(HTTPStatus.INTERNAL_SERVER_ERROR, "The agent has failed; its log tells more.")


def _pull(pull: Pull) -> dict[str, Any]:
    return {
        "id": pull.id,
        "shard": pull.shard,
        "state": pull.state,
        "reason": pull.reason,
        "total": pull.total,
        "done": pull.done,
        "moved": pull.moved,
        "moved_bytes": pull.moved_bytes,
        "skipped": dict(pull.skipped),
        "started_at": pull.started_at,
        "finished_at": pull.finished_at,
    }
