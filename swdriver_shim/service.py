"""The daemon's HTTP API: what it should be and is, for its controller; the verbs, for orgs' callers.

`Authorization: Bearer` says who asks. The controller's token may set the desired document and read how
all stands. A caller's token belongs to one org, and all that it asks for is asked in that org's name.
KV travels as `application/octet-stream`, see `octets`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvss_agent.http_api import (
    Invalid,
    Refused,
    as_json,
    bearer,
    body_of,
    decode,
    failure,
    guarded,
    http_error,
    is_token,
)
from swdriver_shim import metrics, octets
from swdriver_shim.deciding import Receipt
from swdriver_shim.desired import Desired, OrgSpec
from swdriver_shim.keys import TOKEN_MAX, Prompt, isolation_tag
from swdriver_shim.layout import GROUPS_MAX
from swdriver_shim.policy import EvictionName, Priority, Rules, Seconds
from swdriver_shim.shim import Conflict, Shim
from telemetry.exposition import CONTENT_TYPE

TOKENS_MAX: Final = 4 << 20
HEADER_BYTES_MAX: Final = 64 << 20
PURGE_SECONDS_MAX: Final = 60.0
LOAD_SECONDS_MAX: Final = 60.0
COMPUTE_SECONDS_MAX: Final = 3600.0
_REFUSALS: Final[Mapping[type[Exception], HTTPStatus]] = {Conflict: HTTPStatus.CONFLICT}

Token = Annotated[int, Meta(ge=0, le=TOKEN_MAX)]


class PromptBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt: its tokens, and the adapter that the model runs with.

    `namespace`: what the caller takes its KV for, as the hex digest of a `Namespace`. Refused if the
    driver's is another.
    """

    tokens: Annotated[list[Token], Meta(max_length=TOKENS_MAX)]
    adapter: Annotated[str, Meta(max_length=500)] = ""
    namespace: Annotated[str, Meta(max_length=100)] = ""


class LoadBody(PromptBody, frozen=True, kw_only=True):
    """`seconds`: how long to wait, at most, for what lies in tier 2."""

    seconds: Annotated[float, Meta(ge=0, le=LOAD_SECONDS_MAX)] = 0.0


class PrefetchBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `continue_id` that it was stored with."""

    continue_id: Annotated[str, Meta(min_length=1, max_length=200)]


class ComputedBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """So many tokens took the engine so long to compute."""

    tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    seconds: Annotated[float, Meta(gt=0, le=COMPUTE_SECONDS_MAX)]


class StoreBody(PromptBody, frozen=True, kw_only=True):
    """The KV of the first `verified` tokens follows; of all, if it is not said.

    `first_tokens`: by group, from which token on it follows, if not from the start.
    """

    verified: Annotated[int, Meta(ge=0)] | None = None
    first_tokens: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(max_length=GROUPS_MAX)] = field(
        default_factory=dict
    )
    rules: Rules = field(default_factory=Rules)


class DeleteBody(PromptBody, frozen=True, kw_only=True):
    """`shared`: also what others go on from."""

    shared: bool = False


class PriorityBody(PromptBody, frozen=True, kw_only=True):
    priority: Priority


class TtlBody(PromptBody, frozen=True, kw_only=True):
    """Never longer than the policy's."""

    seconds: Seconds


class EvictionBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Until the next document says otherwise."""

    eviction: EvictionName


class PurgeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything of the org; of one adapter, if it is named."""

    adapter: Annotated[str, Meta(max_length=500)] | None = None


Verb = Callable[[OrgSpec, Any], Response]  # in a thread: hashing and moving take their time


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    summary: str
    takes: type[Struct] | None
    verb: Verb


class Service:
    """The routes, over one shim."""

    def __init__(self, shim: Shim, token: str) -> None:
        self.shim = shim
        self._token = token
        self._verbs = (
            _Route(
                "/v1/query", "How many tokens of a prompt a load would give.", PromptBody, self.query
            ),
            _Route("/v1/explain", "A prompt, column by column.", PromptBody, self.explain),
            _Route("/v1/load", "The KV of the longest prefix that is there.", LoadBody, self.load),
            _Route("/v1/prefetch", "A conversation is about to go on.", PrefetchBody, self.prefetch),
            _Route("/v1/computed", "What fetching is held against.", ComputedBody, self.computed),
            _Route("/v1/delete", "Remove a prompt, with a receipt.", DeleteBody, self.delete),
            _Route("/v1/set_priority", "Of what is stored.", PriorityBody, self.set_priority),
            _Route("/v1/set_ttl", "Of what is stored; it only shortens.", TtlBody, self.set_ttl),
            _Route("/v1/evict_policy", "What goes first.", EvictionBody, self.evict_policy),
            _Route("/v1/purge", "Remove all of the org, with a receipt.", PurgeBody, self.purge),
        )

    def application(self) -> Starlette:
        def control(path: str, handler: Any, method: str = "GET") -> Route:
            return Route(path, guarded(handler, self._controls, _REFUSALS), methods=[method])

        def verb(one: _Route) -> Route:
            handler = guarded(self._decoded(one), self._calls, _REFUSALS)
            return Route(one.path, handler, methods=["POST"])

        return Starlette(
            routes=[
                Route("/-/health", self.health),
                Route("/v1/openapi.json", self.openapi),
                control("/metrics", self.metrics),
                control("/v1/desired", self.set_desired, "PUT"),
                control("/v1/observed", self.observed),
                control("/v1/stats", self.stats),
                Route("/v1/store", guarded(self.store, self._calls, _REFUSALS), methods=["POST"]),
                *map(verb, self._verbs),
            ],
            exception_handlers={HTTPException: http_error, Exception: failure},
        )

    # For the controller

    async def health(self, _request: Request) -> Response:
        ready = self.shim.is_ready
        return as_json({"live": True, "ready": ready}, 200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(metrics.page(self.shim), media_type=CONTENT_TYPE)

    async def set_desired(self, request: Request) -> Response:
        told: Desired = await asyncio.to_thread(self.shim.set_desired, await body_of(request))
        return as_json({"generation": told.generation}, 202)

    async def observed(self, _request: Request) -> Response:
        return as_json(self.shim.observed())

    async def stats(self, _request: Request) -> Response:
        return as_json([asdict(org) for org in self.shim.driver.orgs()])

    # For callers

    def query(self, org: OrgSpec, body: PromptBody) -> Response:
        prompt = self._prompt(org, body)
        return as_json({"tokens": self.shim.driver.query(prompt), "asked": prompt.tokens})

    def explain(self, org: OrgSpec, body: PromptBody) -> Response:
        told = self.shim.driver.explain(self._prompt(org, body))
        return as_json({group: [asdict(one) for one in columns] for group, columns in told.items()})

    def load(self, org: OrgSpec, body: LoadBody) -> Response:
        prompt, driver = self._prompt(org, body), self.shim.mover
        kv = octets.Kv(driver.layout, prompt.tokens)
        loaded = driver.load(prompt, kv.part, seconds=body.seconds)
        return Response(kv.encode(loaded.tokens), media_type=octets.OCTETS)

    def computed(self, org: OrgSpec, body: ComputedBody) -> Response:
        self.shim.driver.computed(org.name, body.tokens, body.seconds)
        return as_json(self.shim.driver.worth()[org.name])

    def prefetch(self, org: OrgSpec, body: PrefetchBody) -> Response:
        return as_json({"begun": self.shim.driver.prefetch(org.name, body.continue_id)})

    async def store(self, request: Request) -> Response:
        org, raw = self._org(request), await body_of(request, octets.KV_BYTES_MAX)
        return await asyncio.to_thread(self._store, org, memoryview(raw))

    def _store(self, org: OrgSpec, raw: memoryview) -> Response:
        body, kv_raw = octets.unpack(raw, _STORE)
        prompt, driver = self._prompt(org, body), self.shim.mover
        verified = prompt.tokens if body.verified is None else body.verified
        if verified > prompt.tokens:
            raise Invalid(f"There are {prompt.tokens} tokens; {verified} can't be verified.")
        if unknown := set(body.first_tokens) - {group.name for group in driver.layout.groups}:
            raise Invalid(f"There is no group {min(unknown)}.")
        first = [body.first_tokens.get(group.name, 0) for group in driver.layout.groups]
        if max(first) > verified:
            raise Invalid(f"KV from token {max(first)} on is behind the {verified} that are verified.")
        kv = octets.Kv(driver.layout, verified, kv_raw, first)
        return as_json(driver.store(prompt, verified, kv.part, body.rules, first))

    def delete(self, org: OrgSpec, body: DeleteBody) -> Response:
        prompt, driver = self._prompt(org, body), self.shim.driver
        return _receipt(driver.delete(prompt, shared=body.shared, seconds=PURGE_SECONDS_MAX))

    def set_priority(self, org: OrgSpec, body: PriorityBody) -> Response:
        count = self.shim.driver.set_priority(self._prompt(org, body), body.priority)
        return as_json({"columns": count})

    def set_ttl(self, org: OrgSpec, body: TtlBody) -> Response:
        return as_json({"columns": self.shim.driver.set_ttl(self._prompt(org, body), body.seconds)})

    def evict_policy(self, org: OrgSpec, body: EvictionBody) -> Response:
        self.shim.driver.evict_policy(org.name, body.eviction)
        return as_json({"eviction": body.eviction})

    def purge(self, org: OrgSpec, body: PurgeBody) -> Response:
        driver = self.shim.driver
        adapter = body.adapter
        namespace = None if adapter is None else self.shim.keys(org, adapter).namespace
        tag = isolation_tag(org.name, org.secret)
        return _receipt(driver.purge(org.name, namespace, tag=tag, seconds=PURGE_SECONDS_MAX))

    # Inside

    def _controls(self, request: Request) -> bool:
        return is_token(bearer(request), self._token)

    def _calls(self, request: Request) -> bool:
        return self.shim.caller(bearer(request)) is not None

    def _org(self, request: Request) -> OrgSpec:
        org = self.shim.caller(bearer(request))
        if org is None:
            raise Refused(HTTPStatus.UNAUTHORIZED, "A token is needed, as a bearer.")
        return org

    def _decoded(self, route: _Route) -> Callable[[Request], Awaitable[Response]]:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(route.takes)

        async def answer(request: Request) -> Response:
            body = decode(await body_of(request, HEADER_BYTES_MAX), decoder)
            return await asyncio.to_thread(route.verb, self._org(request), body)

        return answer

    def _prompt(self, org: OrgSpec, body: PromptBody) -> Prompt:
        keys = self.shim.keys(org, body.adapter)
        if body.namespace not in ("", keys.namespace.digest().hex()):
            raise Invalid("This driver's KV is of another model, revision, dtype or layout.")
        return keys.prompt(body.tokens)

    async def openapi(self, _request: Request) -> Response:
        """OpenAPI 3.1 of the verbs, made from what they take."""
        kinds = [route.takes for route in self._verbs if route.takes]
        schemas, components = msgspec.json.schema_components(
            kinds, ref_template="#/components/schemas/{name}"
        )
        content = {route.path: schema for route, schema in zip(self._verbs, schemas, strict=True)}
        problem = {"description": "Refused, with a sentence: application/problem+json."}
        paths = {
            route.path: {
                "post": {
                    "summary": route.summary,
                    "operationId": route.path.rpartition("/")[2],
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": content[route.path]}},
                    },
                    "responses": {
                        "200": {"description": "Done."},
                        **{str(status): problem for status in (401, 409, 413, 422)},
                    },
                }
            }
            for route in self._verbs
        }
        paths["/v1/store"] = {
            "post": {
                "summary": "Store the KV of a prompt's verified tokens.",
                "operationId": "store",
                "requestBody": {
                    "required": True,
                    "description": octets.__doc__,
                    "content": {octets.OCTETS: {"schema": {"type": "string", "format": "binary"}}},
                },
                "responses": {
                    "200": {"description": "How many columns and bytes went out."},
                    **{str(status): problem for status in (401, 409, 413, 422)},
                },
            }
        }
        return as_json(
            {
                "openapi": "3.1.0",
                "info": {"title": "SwDriver shim", "version": "1"},
                "security": [{"token": []}],
                "paths": paths,
                "components": {
                    "schemas": components,
                    "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
                },
            }
        )


_STORE: Final = msgspec.json.Decoder(StoreBody)


def _receipt(receipt: Receipt) -> Response:
    """202 while some slot is not empty yet."""
    return as_json(receipt, 200 if receipt.done else 202)
