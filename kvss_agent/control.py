"""The control API of an agent, over HTTP: what it should be, what it is, and a few verbs.

Everything but `/-/health` asks for `Authorization: Bearer`: the token of the agent, which its console
has, and over TLS the console's certificate beside it; the token alone is enough for `/metrics`. A driver
has neither. It brings a capability for one move, and may do what that allows and nothing else.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvss_agent import metrics
from kvss_agent.agent import Agent, NotReady, Unknown
from kvss_agent.data_plane.constants import SLOTS_MAX
from kvss_agent.desired import HEX_16, Document, Name
from kvss_agent.documents import decode
from kvss_agent.http import controller
from kvss_agent.http.api import Handler, OwnerOf, Refused, as_json, bearer, body_of, guarded
from kvss_agent.http.controller import controller_of, is_private, peer_of_request
from kvss_agent.pulls import Pull
from kvss_agent.security import capabilities
from kvss_agent.security.capabilities import Capability, NotAllowed
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.tier2.backend import Failed
from telemetry.emit.exposition import CONTENT_TYPE


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
    Unknown: HTTPStatus.NOT_FOUND,
    NotReady: HTTPStatus.SERVICE_UNAVAILABLE,
    Failed: HTTPStatus.BAD_GATEWAY,
}


class Control:
    """The routes, over one agent."""

    def __init__(self, agent: Agent, identity: ProcessIdentity | None = None) -> None:
        """`identity`: what the agent signs with."""
        self.agent = agent
        self._identity = identity
        self._owner = partial(controller_of, token=agent.settings.token)

    def application(self) -> Starlette:
        def route(
            path: str, handler: Handler, method: str = "GET", owner_of: OwnerOf | None = None
        ) -> Route:
            return Route(path, guarded(handler, owner_of or self._owner, _REFUSALS), methods=[method])

        return controller.application(
            [
                Route("/-/health", self.health),
                route(controller.METRICS, self.metrics),
                route("/v1/desired", self.set_desired, "PUT"),
                route("/v1/observed", self.observed),
                route("/v1/shards/{name}", self.shard),
                route("/v1/shards/{name}/pull", self.pull, "POST", self._mover),
                route("/v1/pulls", self.list_pulls),
                route("/v1/pulls/{id}", self.get_pull, owner_of=self._mover),
                route("/v1/pulls/{id}", self.cancel_pull, "DELETE", self._mover),
                route("/v1/purge", self.purge, "POST"),
                route("/v1/purges", self.confirm_purge, "POST"),
                route("/v1/drain", self.drain, "POST"),
            ]
        )

    # Reading

    async def health(self, _request: Request) -> Response:
        return controller.health(ready=self.agent.is_ready)

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
        if allowed := self._capability(request):
            _check(allowed, request.path_params["name"], asked)
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

    async def confirm_purge(self, request: Request) -> Response:
        """From memory and all stores."""
        return await controller.confirm_purge(request, self._identity, self.agent.purges.confirm)

    async def drain(self, _request: Request) -> Response:
        self.agent.drain()
        return as_json({"draining": True, "connections": self.agent.plane.connections}, 202)

    # Inside

    def _mover(self, request: Request) -> str | None:
        """The console, or a driver: what that may in particular is looked at later."""
        allowed = self._capability(request)
        return allowed.holder if allowed else self._owner(request)

    def _capability(self, request: Request) -> Capability | None:
        """What allows this request; None where it is the console's. Raises Refused."""
        text, trust = bearer(request), self.agent.trust
        if not capabilities.is_one(text):
            return None
        try:
            allowed = capabilities.read(text, trust.authorities if trust else ())
        except NotAllowed as error:
            raise Refused(HTTPStatus.FORBIDDEN, str(error)) from error
        if trust is None or allowed.audience != trust.identity.topic:
            raise Refused(HTTPStatus.FORBIDDEN, "The capability is for another agent.")
        if is_private(request):
            peer = peer_of_request(request)
            if peer is None or (peer.topic, peer.key) != (allowed.holder, allowed.holder_key):
                raise Refused(HTTPStatus.FORBIDDEN, "The capability is another driver's.")
        return allowed

    def _pull(self, request: Request) -> Pull:
        allowed = self._capability(request)
        pull = self.agent.pulls.get(request.path_params["id"])
        if pull and allowed and (pull.shard, pull.driver) != (allowed.shard, allowed.driver):
            pull = None
        if pull is None:
            raise Unknown("There is no such pull; only the last few hundred are listed.")
        return pull


def _check(allowed: Capability, shard: str, asked: PullRequest) -> None:
    """Raises Refused where this is not the move that is allowed."""
    said = (shard, asked.from_, asked.shard, asked.as_)
    if said != (allowed.shard, allowed.source, allowed.source_shard, allowed.driver):
        raise Refused(HTTPStatus.FORBIDDEN, "The capability is for another move.")
    if max(asked.slots) >= allowed.slots:
        raise Refused(HTTPStatus.FORBIDDEN, f"The capability is for slots below {allowed.slots}.")


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
        "rest_seconds": round(pull.rest_seconds, 6),
        "started_at": pull.started_at,
        "finished_at": pull.finished_at,
    }
