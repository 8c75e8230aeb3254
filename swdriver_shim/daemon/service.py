"""The daemon's HTTP API: what it should be and is, for its controller; the verbs, for orgs' callers.

`Authorization: Bearer` says who asks. The controller's token may set the desired document and read how
all stands. A caller's token belongs to one org, and all that it asks for is asked in that org's name.
KV travels as `application/octet-stream`, see `octets`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final, ParamSpec, TypeVar

import msgspec
from msgspec import Meta, Struct, field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvss_agent.http.api import (
    CONTROLLER,
    RETRY_SECONDS,
    Invalid,
    Refused,
    announced_bytes,
    as_json,
    bearer,
    body_of,
    decode,
    failure,
    guarded,
    http_error,
    is_token,
    large_body_of,
)
from kvss_agent.http.callers import check_console
from kvss_agent.limits.shares import FairShare, NoShare, Shares
from kvss_agent.security.confirmations import Question, sign
from kvss_agent.security.identity import ProcessIdentity
from swdriver_shim.cache.reuse.sample import Sample
from swdriver_shim.daemon import binary, explanations, metrics
from swdriver_shim.daemon.explanations import TOKENS_MAX, ExplainOrgBody, RequestName, Token
from swdriver_shim.daemon.shim import (
    VERBS_AT_ONCE,
    VERBS_OF_ONE_ORG,
    VERBS_WAITING,
    Conflict,
    NotConfirmedYet,
    Shim,
    owner_of,
)
from swdriver_shim.decider.decider import Permit
from swdriver_shim.decider.removals import Receipt
from swdriver_shim.desired import OrgSpec
from swdriver_shim.keys import Keys, Prompt, isolation_tag
from swdriver_shim.layout import GROUPS_MAX
from swdriver_shim.object_store import TooLarge
from swdriver_shim.objects import Objects
from swdriver_shim.policy import DisplacementName, Priority, Rules, Seconds
from telemetry.emit.exposition import CONTENT_TYPE

HEADER_BYTES_MAX: Final = 64 << 20
PURGE_SECONDS_MAX: Final = 60.0
LOAD_SECONDS_MAX: Final = 60.0
COMPUTE_SECONDS_MAX: Final = 3600.0
OBJECTS_MAX: Final = 4096  # in one request
THREADS_MAX: Final = 2 * VERBS_AT_ONCE  # with those that are reserved for orgs
BODY_BYTES_LEAST: Final = 64 << 10  # as which any request counts
PIECE_BYTES: Final = 256 << 10  # of an answer that are sent before others have their turn
TURN_SECONDS: Final = 30.0  # to wait until an org has room for one more
CONTROLS_AT_ONCE: Final = 4
_REFUSALS: Final[Mapping[type[Exception], HTTPStatus]] = {Conflict: HTTPStatus.CONFLICT}

ObjectKey = Annotated[str, Meta(pattern="^(?:[0-9a-f]{2}){1,512}$")]


class PromptBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt: its tokens, and the adapter that the model runs with.

    `namespace`: what the caller takes its KV for, as the hex digest of a `Namespace`. Refused if the
    driver's is another. `request`: as the engine calls what it asks for, so that people can ask what
    became of it.
    """

    tokens: Annotated[list[Token], Meta(max_length=TOKENS_MAX)]
    adapter: Annotated[str, Meta(max_length=500)] = ""
    namespace: Annotated[str, Meta(max_length=100)] = ""
    request: RequestName = ""


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


class DisplacementBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Until the next document says otherwise."""

    displacement: DisplacementName


class PurgeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything of the org; of one adapter, if it is named."""

    adapter: Annotated[str, Meta(max_length=500)] | None = None


class ObjectsBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Objects, by the engine's own keys in hex, in the order of a prompt. `namespace`: as for that."""

    keys: Annotated[list[ObjectKey], Meta(max_length=OBJECTS_MAX)]
    namespace: Annotated[str, Meta(max_length=100)] = ""


class FindBody(ObjectsBody, frozen=True, kw_only=True):
    """`seconds`: how long to wait, at most, for what lies in tier 2."""

    seconds: Annotated[float, Meta(ge=0, le=LOAD_SECONDS_MAX)] = 0.0


class PutBody(ObjectsBody, frozen=True, kw_only=True):
    """The values follow, so many bytes of each."""

    lengths: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(max_length=OBJECTS_MAX)]
    rules: Rules = field(default_factory=Rules)


P = ParamSpec("P")
T = TypeVar("T")
Verb = Callable[[OrgSpec, Any], Response]  # in a thread: hashing and moving take their time


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    summary: str
    takes: type[Struct] | None
    verb: Verb


class Service:
    """The routes, over one shim."""

    def __init__(self, shim: Shim, token: str, identity: ProcessIdentity | None = None) -> None:
        """`identity`: what the driver signs with."""
        self.shim = shim
        self._identity = identity
        self._token = token
        # Apart from each other: callers may all be waiting for what the controller is about to mend.
        self._for_callers = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="verb")
        self._reading = FairShare(Shares(total=1, per_owner=1, reserved=1, waiting=VERBS_WAITING))
        self._for_controller = ThreadPoolExecutor(CONTROLS_AT_ONCE, thread_name_prefix="control")
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
            _Route(
                "/v1/displacement",
                "Set which columns are displaced to make room.",
                DisplacementBody,
                self.set_displacement,
            ),
            _Route("/v1/purge", "Remove all of the org, with a receipt.", PurgeBody, self.purge),
            _Route("/v1/objects/exists", "Which of them are there.", FindBody, self.objects_exist),
            _Route("/v1/objects/get", "The values of those that are there.", FindBody, self.get_objects),
            _Route(
                "/v1/objects/remove",
                "Remove them, with a receipt.",
                ObjectsBody,
                self.remove_objects,
            ),
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
                control("/v1/reuse", self.reuse),
                control("/v1/purges", self.confirm_purge, "POST"),
                control("/v1/explain_org", self.explain_org, "POST"),
                control("/v1/requests", self.requests),
                Route("/v1/store", guarded(self.store, self._calls, _REFUSALS), methods=["POST"]),
                Route(
                    "/v1/objects/put",
                    guarded(self.put_objects, self._calls, _REFUSALS),
                    methods=["POST"],
                ),
                *map(verb, self._verbs),
            ],
            exception_handlers={HTTPException: http_error, Exception: failure},
        )

    # For the controller

    async def health(self, _request: Request) -> Response:
        ready = self.shim.is_ready
        return as_json({"live": True, "ready": ready}, 200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        page = await _in(self._for_controller, metrics.page, self.shim)
        return Response(page, media_type=CONTENT_TYPE)

    async def set_desired(self, request: Request) -> Response:
        told = await _in(self._for_controller, self.shim.set_desired, await body_of(request))
        followed = self.shim.observed_generation
        return as_json({"generation": told.generation, "observed_generation": followed}, 202)

    async def observed(self, _request: Request) -> Response:
        return as_json(await _in(self._for_controller, self.shim.observed))

    async def stats(self, _request: Request) -> Response:
        return as_json([asdict(org) for org in self.shim.driver.statistics.orgs()])

    async def reuse(self, request: Request) -> Response:
        """How an org's columns come back; without one, of which orgs something is known."""
        ledger, org = self.shim.driver.ledger, request.query_params.get("org")
        if org is None:
            accounts = list(ledger.accounts.values())
            return as_json([{"org": one.org, "requests": one.tally.requests} for one in accounts])
        sample = ledger.reuse(org, time.monotonic())  # the clock of a driver in a daemon
        if sample is None:
            raise Refused(HTTPStatus.NOT_FOUND, "This driver has never heard of that org.")
        return as_json(sample)

    async def confirm_purge(self, request: Request) -> Response:
        """Remove all that carries tags that are nobody's any more: 200 with a signed statement, 202 with
        a sentence while it is not done."""
        question = decode(await body_of(request), _QUESTION)
        if self._identity is None:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "This driver has no identity to sign with.")
        try:
            statement = await _in(self._for_controller, self.shim.purge, question, self._identity.topic)
        except NotConfirmedYet as why:
            return as_json({"detail": str(why)}, 202)
        return as_json(sign(self._identity, statement))

    async def explain_org(self, request: Request) -> Response:
        """What the org itself may ask, with `/v1/explain`; and what became of a request."""
        body = decode(await body_of(request, HEADER_BYTES_MAX), _EXPLAIN_ORG)
        return as_json(await _in(self._for_controller, explanations.explain, self.shim, body))

    async def requests(self, request: Request) -> Response:
        """The last requests of an org that had a name; or whose one of this name was."""
        if name := request.query_params.get("request"):
            found = await _in(self._for_controller, self.shim.driver.orgs_of_request, name)
            return as_json([{"org": org} for org in found])
        org = request.query_params.get("org", "")
        return as_json(await _in(self._for_controller, explanations.newest, self.shim, org))

    # For callers

    def query(self, org: OrgSpec, body: PromptBody) -> Response:
        prompt = self._prompt(org, body)
        return as_json({"tokens": self.shim.driver.query(prompt), "asked": prompt.tokens})

    def explain(self, org: OrgSpec, body: PromptBody) -> Response:
        told = self.shim.driver.explain(self._prompt(org, body))
        return as_json({group: [asdict(one) for one in columns] for group, columns in told.items()})

    def load(self, org: OrgSpec, body: LoadBody) -> Response:
        prompt, driver = self._prompt(org, body), self.shim.mover
        there = prompt.tokens if body.seconds else driver.query(prompt)

        def make() -> bytes:
            kv = binary.Kv(driver.layout, prompt.tokens)
            loaded = driver.load(prompt, kv.part, seconds=body.seconds)
            return kv.encode(loaded.tokens)

        return self._answer(org, binary.bytes_of(driver.layout, there), make)

    def computed(self, org: OrgSpec, body: ComputedBody) -> Response:
        self.shim.driver.computed(org.name, body.tokens, body.seconds)
        return as_json(self.shim.driver.statistics.break_even()[org.name])

    def prefetch(self, org: OrgSpec, body: PrefetchBody) -> Response:
        return as_json({"begun": self.shim.driver.prefetch(org.name, body.continue_id)})

    async def store(self, request: Request) -> Response:
        org = self._org(request)
        permit = self.shim.permit(bearer(request), org)
        async with self._body(org, request, binary.KV_BYTES_MAX) as raw, self._turn(org):
            return await _in(self._for_callers, self._store, org, raw, permit)

    def _store(self, org: OrgSpec, raw: memoryview, permit: Permit) -> Response:
        body, kv_raw = binary.unpack(raw, _STORE)
        prompt, driver = self._prompt(org, body), self.shim.mover
        verified = prompt.tokens if body.verified is None else body.verified
        if verified > prompt.tokens:
            raise Invalid(f"There are {prompt.tokens} tokens; {verified} can't be verified.")
        if unknown := set(body.first_tokens) - {group.name for group in driver.layout.groups}:
            raise Invalid(f"There is no group {min(unknown)}.")
        first = [body.first_tokens.get(group.name, 0) for group in driver.layout.groups]
        if max(first) > verified:
            raise Invalid(f"KV from token {max(first)} on is behind the {verified} that are verified.")
        kv = binary.Kv(driver.layout, verified, kv_raw, first)
        stored = driver.store(prompt, verified, kv.part, body.rules, first, permit)
        return _permitted(as_json(stored), permit)

    def delete(self, org: OrgSpec, body: DeleteBody) -> Response:
        prompt, driver = self._prompt(org, body), self.shim.driver
        return _receipt(driver.delete(prompt, shared=body.shared, seconds=PURGE_SECONDS_MAX))

    def set_priority(self, org: OrgSpec, body: PriorityBody) -> Response:
        count = self.shim.driver.set_priority(self._prompt(org, body), body.priority)
        return as_json({"columns": count})

    def set_ttl(self, org: OrgSpec, body: TtlBody) -> Response:
        return as_json({"columns": self.shim.driver.set_ttl(self._prompt(org, body), body.seconds)})

    def set_displacement(self, org: OrgSpec, body: DisplacementBody) -> Response:
        self.shim.driver.set_displacement(org.name, body.displacement)
        return as_json({"displacement": body.displacement})

    def purge(self, org: OrgSpec, body: PurgeBody) -> Response:
        driver = self.shim.driver
        adapter = body.adapter
        namespace = None if adapter is None else self.shim.keys(org, adapter).namespace
        tag = isolation_tag(org.name, org.secret)
        return _receipt(driver.purge(org.name, namespace, tag=tag, seconds=PURGE_SECONDS_MAX))

    # Objects

    def objects_exist(self, org: OrgSpec, body: FindBody) -> Response:
        """And how large a value may be: who has no keys asks just that."""
        objects = self._objects(org)
        found = objects.exists(self._named(org, body), body.seconds)
        return as_json({"exists": found, "value_bytes_max": objects.value_bytes_max})

    def get_objects(self, org: OrgSpec, body: FindBody) -> Response:
        """Only as many as go at once: the others are missed, and may be asked for again."""
        objects = self._objects(org)
        keys = self._named(org, body)
        size = objects.value_bytes_max
        most = min(binary.KV_BYTES_MAX, self.shim.transfers.shares.per_owner) // size

        def make() -> bytes:
            places = [memoryview(bytearray(size)) for _ in keys[:most]]
            lengths = objects.get(keys[:most], places, body.seconds)
            values = [place[:length] for place, length in zip(places, lengths, strict=True) if length]
            head = binary.ObjectsHead(lengths=[*lengths, *[None] * (len(keys) - len(lengths))])
            return binary.pack(head, *values)

        return self._answer(org, len(keys[:most]) * size, make)

    async def put_objects(self, request: Request) -> Response:
        org = self._org(request)
        permit = self.shim.permit(bearer(request), org)
        async with self._body(org, request, binary.KV_BYTES_MAX) as raw, self._turn(org):
            return await _in(self._for_callers, self._put_objects, org, raw, permit)

    def _put_objects(self, org: OrgSpec, raw: memoryview, permit: Permit) -> Response:
        body, values = binary.unpack(raw, _PUT)
        if len(body.lengths) != len(body.keys) or sum(body.lengths) != len(values):
            raise Invalid(
                f"{len(body.keys)} values are named, of {sum(body.lengths)} bytes in all; "
                f"{len(body.lengths)} lengths and {len(values)} bytes came."
            )
        try:
            self._objects(org)
            named = self.shim.keys(org).named(self._named(org, body))
            kept = self.shim.mover.objects.put(
                named, binary.cut(values, body.lengths), body.rules, permit
            )
        except TooLarge as error:
            raise Invalid(str(error)) from error
        return _permitted(as_json({"kept": kept}), permit)

    def remove_objects(self, org: OrgSpec, body: ObjectsBody) -> Response:
        self._objects(org)
        named = self.shim.keys(org).named(self._named(org, body))
        return _receipt(self.shim.driver.delete(named, shared=True, seconds=PURGE_SECONDS_MAX))

    def _objects(self, org: OrgSpec) -> Objects:
        return self.shim.objects(org)

    def _named(self, org: OrgSpec, body: ObjectsBody) -> list[bytes]:
        self._check(self.shim.keys(org), body.namespace)
        return [bytes.fromhex(key) for key in body.keys]

    # Inside

    def _controls(self, request: Request) -> str | None:
        """Over TLS the console, which has the token. Whoever has that alone may read `/metrics`."""
        if not is_token(bearer(request), self._token):
            return None
        if request.url.path != "/metrics":
            check_console(request)
        return CONTROLLER

    def _calls(self, request: Request) -> str | None:
        org = self.shim.caller(bearer(request))
        return owner_of(org.name) if org else None

    def _org(self, request: Request) -> OrgSpec:
        org = self.shim.caller(bearer(request))
        if org is None:
            raise Refused(HTTPStatus.UNAUTHORIZED, "A bearer token is required.")
        return org

    @contextlib.asynccontextmanager
    async def _turn(self, org: OrgSpec) -> AsyncIterator[None]:
        """One of the verbs that are carried out at once. Raises Refused."""
        async with contextlib.AsyncExitStack() as stack:
            with _refusing(f"More than {VERBS_OF_ONE_ORG} requests of an org are not done at once."):
                held = self.shim.verbs.held_async(org.name, seconds=TURN_SECONDS)
                await stack.enter_async_context(held)
            yield

    @contextlib.asynccontextmanager
    async def _body(self, org: OrgSpec, request: Request, most: int) -> AsyncIterator[memoryview]:
        """The body, which counts as the org's for as long as this lasts: from before it is read, and
        with all that it announces. Raises Refused."""
        share = self.shim.transfers
        most = min(most, share.shares.per_owner)
        announced = announced_bytes(request)
        amount = most if announced is None else announced
        if amount > most:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body may have at most {most} bytes."
            )
        async with contextlib.AsyncExitStack() as stack:
            with _refusing(self._too_much):
                held = share.held_async(org.name, max(amount, BODY_BYTES_LEAST), seconds=TURN_SECONDS)
                await stack.enter_async_context(held)
            yield await stack.enter_async_context(large_body_of(request, most))

    @property
    def _too_much(self) -> str:
        most = self.shim.transfers.shares.per_owner
        return f"Requests and answers of an org have at most {most} bytes at once: finish some first."

    def _answer(self, org: OrgSpec, amount: int, make: Callable[[], bytes]) -> Response:
        """An answer of up to so many bytes, which counts as the org's from before it is made until it
        was sent. Raises Refused."""
        share, stack = self.shim.transfers, contextlib.ExitStack()
        with _refusing(self._too_much):
            amount = min(amount, share.shares.per_owner)
            stack.enter_context(share.held(org.name, amount, seconds=TURN_SECONDS))
        try:
            return _Counted(make(), stack)
        except BaseException:
            stack.close()
            raise

    def _decoded(self, route: _Route) -> Callable[[Request], Awaitable[Response]]:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(route.takes)

        async def answer(request: Request) -> Response:
            org = self._org(request)
            async with self._body(org, request, HEADER_BYTES_MAX) as raw:
                body = await self._read(org, raw, decoder)
            async with self._turn(org):
                return await _in(self._for_callers, route.verb, org, body)

        return answer

    async def _read(self, org: OrgSpec, raw: memoryview, decoder: msgspec.json.Decoder[T]) -> T:
        """The body as a value. A long one takes the interpreter for a tenth of a second and more, so it
        is read beside everything else, and of each org one at a time. Raises Invalid and Refused."""
        if len(raw) <= BODY_BYTES_LEAST:
            return decode(bytes(raw), decoder)
        async with contextlib.AsyncExitStack() as stack:
            with _refusing("Long bodies of an org are read one after the other: send fewer at once."):
                held = self._reading.held_async(org.name, seconds=TURN_SECONDS)
                await stack.enter_async_context(held)
            return await _in(self._for_callers, decode, bytes(raw), decoder)

    def _prompt(self, org: OrgSpec, body: PromptBody) -> Prompt:
        keys = self.shim.keys(org, body.adapter)
        self._check(keys, body.namespace)
        return keys.prompt(body.tokens, body.request)

    @staticmethod
    def _check(keys: Keys, namespace: str) -> None:
        if namespace and namespace != keys.namespace.digest().hex():
            raise Invalid("This driver's KV is of another model, revision, dtype or layout.")

    async def openapi(self, _request: Request) -> Response:
        """OpenAPI 3.1 of the verbs, made from what they take."""
        kinds: list[type[Struct]] = [route.takes for route in self._verbs if route.takes]
        kinds.append(Sample)
        schemas, components = msgspec.json.schema_components(
            kinds, ref_template="#/components/schemas/{name}"
        )
        content = {route.path: schema for route, schema in zip(self._verbs, schemas[:-1], strict=True)}
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
                        **{str(status): problem for status in (401, 409, 413, 422, 429, 503)},
                    },
                }
            }
            for route in self._verbs
        }
        for path, summary, done in (
            (
                "/v1/store",
                "Store the KV of a prompt's verified tokens.",
                "How many columns and bytes went out.",
            ),
            ("/v1/objects/put", "Keep objects.", "Which of them are kept."),
        ):
            paths[path] = {
                "post": {
                    "summary": summary,
                    "operationId": path.rpartition("/")[2],
                    "requestBody": {
                        "required": True,
                        "description": binary.__doc__,
                        "content": {binary.OCTETS: {"schema": {"type": "string", "format": "binary"}}},
                    },
                    "responses": {
                        "200": {"description": done},
                        **{str(status): problem for status in (401, 409, 413, 422, 429, 503)},
                    },
                }
            }
        paths["/v1/reuse"] = {"get": _reuse_operation(schemas[-1], problem)}
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


def _reuse_operation(schema: Mapping[str, Any], problem: Mapping[str, Any]) -> dict[str, Any]:
    known = {"type": "array", "items": {"type": "object"}}
    return {
        "summary": "How an org's columns come back, for previews of policies; the controller's token.",
        "operationId": "reuse",
        "parameters": [
            {
                "name": "org",
                "in": "query",
                "required": False,
                "description": "Without it, the orgs of which something is known.",
                "schema": {"type": "string"},
            }
        ],
        "responses": {
            "200": {
                "description": "A sample, or the orgs.",
                "content": {"application/json": {"schema": {"oneOf": [schema, known]}}},
            },
            **{str(status): problem for status in (401, 404)},
        },
    }


async def _in(pool: Executor, work: Callable[P, T], *what: P.args, **named: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *what, **named))


_QUESTION: Final = msgspec.json.Decoder(Question)
_EXPLAIN_ORG: Final = msgspec.json.Decoder(ExplainOrgBody)
_STORE: Final = msgspec.json.Decoder(StoreBody)
_PUT: Final = msgspec.json.Decoder(PutBody)


def _permitted(answer: Response, permit: Permit) -> Response:
    """Whoever was refused while it went on is told so. Raises Refused."""
    if not permit():
        raise Refused(
            HTTPStatus.UNAUTHORIZED,
            "This token is no token of its org any more: what came with it was not kept.",
        )
    return answer


class _Counted(Response):
    """Octets that count as an org's until they are sent."""

    def __init__(self, content: bytes, held: contextlib.ExitStack) -> None:
        super().__init__(content, media_type=binary.OCTETS)
        self._held = held

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Piece by piece: all of it in one would be encrypted while everybody else waits."""
        body = memoryview(self.body)
        with self._held:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            for at in range(0, max(len(body), 1), PIECE_BYTES):
                rest = at + PIECE_BYTES < len(body)
                piece = body[at : at + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": rest})
                await asyncio.sleep(0)


@contextlib.contextmanager
def _refusing(sentence: str) -> Iterator[None]:
    """Of an org that has too much under way: it is its own, and others go on."""
    try:
        yield
    except NoShare:
        raise Refused(HTTPStatus.TOO_MANY_REQUESTS, sentence, RETRY_SECONDS) from None


def _receipt(receipt: Receipt) -> Response:
    """202 while some slot is not empty yet."""
    return as_json(receipt, 200 if receipt.done else 202)
