"""The control API of an agent, over HTTP: what it should be, what it is, and a few verbs.

Everything but `/-/health` asks for `Authorization: Bearer <token>`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvss_agent import metrics
from kvss_agent.agent import Agent, Conflict, NotNow, Unknown
from kvss_agent.core import SLOTS_MAX
from kvss_agent.desired import HEX_16, Document, Name
from kvss_agent.http_api import (
    Handler,
    as_json,
    bearer,
    body_of,
    decode,
    failure,
    guarded,
    http_error,
    is_token,
)
from kvss_agent.pulling import Pull
from kvss_agent.tier2.backend import Failed
from telemetry.exposition import CONTENT_TYPE


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


_REFUSALS: Final = {
    Conflict: HTTPStatus.CONFLICT,
    Unknown: HTTPStatus.NOT_FOUND,
    NotNow: HTTPStatus.SERVICE_UNAVAILABLE,
    Failed: HTTPStatus.BAD_GATEWAY,
}


class Control:
    """The routes, over one agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def application(self) -> Starlette:
        def route(path: str, handler: Handler, method: str = "GET") -> Route:
            return Route(path, guarded(handler, self._may, _REFUSALS), methods=[method])

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
            exception_handlers={HTTPException: http_error, Exception: failure},
        )

    # Reading

    async def health(self, _request: Request) -> Response:
        """Alive, and whether all that was asked for is there. Says nothing that is worth a token."""
        ready = self.agent.is_ready
        return as_json({"live": True, "ready": ready}, 200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        text = await asyncio.to_thread(metrics.page, self.agent)
        return Response(text, media_type=CONTENT_TYPE)

    async def observed(self, _request: Request) -> Response:
        return as_json(self.agent.observed())

    async def shard(self, request: Request) -> Response:
        name = request.path_params["name"]
        answer = self.agent.shard(name)
        if hosted := self.agent.shards.get(name):
            answer["occupied_slots"] = await asyncio.to_thread(hosted.occupied)
        return as_json(answer)

    async def list_pulls(self, _request: Request) -> Response:
        return as_json([_pull(pull) for pull in self.agent.pulls.values()])

    async def get_pull(self, request: Request) -> Response:
        return as_json(_pull(self._pull(request)))

    # Changing

    async def set_desired(self, request: Request) -> Response:
        told = await self.agent.set_desired(await body_of(request))
        return as_json({"generation": told.generation}, 202)

    async def pull(self, request: Request) -> Response:
        asked = decode(await body_of(request), _PULL)
        begun = self.agent.pull(
            request.path_params["name"], asked.from_, asked.shard, asked.as_, asked.after, asked.slots
        )
        return as_json(_pull(begun), 202)

    async def cancel_pull(self, request: Request) -> Response:
        pull = self._pull(request)
        pull.cancel()
        return as_json(_pull(pull), 202)

    async def purge(self, request: Request) -> Response:
        asked = decode(await body_of(request), _PURGE)
        receipt = await self.agent.purge(
            tag=bytes.fromhex(asked.tag) if asked.tag else None,
            namespace=bytes.fromhex(asked.namespace) if asked.namespace else None,
        )
        return as_json(receipt)

    async def drain(self, _request: Request) -> Response:
        self.agent.drain()
        return as_json({"draining": True, "connections": self.agent.plane.connections}, 202)

    # Inside

    def _may(self, request: Request) -> bool:
        return is_token(bearer(request), self.agent.settings.token)

    def _pull(self, request: Request) -> Pull:
        pull = self.agent.pulls.get(request.path_params["id"])
        if pull is None:
            raise Unknown("There is no such pull; the last few hundred are kept.")
        return pull


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
