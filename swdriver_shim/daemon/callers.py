"""The verbs of an org's callers, over one shim. The org is always the one that the token belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import pairwise
from typing import Any, Final, Generic, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvss_agent.documents import Invalid
from kvss_agent.http.api import Refused, as_json, bearer
from swdriver_shim.cache.misses import ColumnState
from swdriver_shim.daemon import binary, verbs
from swdriver_shim.daemon.admission import BODY_BYTES_LEAST, OrgAdmission
from swdriver_shim.daemon.shim import VERBS_AT_ONCE, Shim, owner_of
from swdriver_shim.daemon.verbs import Verb
from swdriver_shim.decider.decider import Permit
from swdriver_shim.decider.removals import Receipt
from swdriver_shim.decider.statistics import BreakEvenTokens
from swdriver_shim.desired import OrgSpec
from swdriver_shim.driver import Stored
from swdriver_shim.keys import Keys, Named, Prompt
from swdriver_shim.object_store import TooLarge

HEADER_BYTES_MAX: Final = 64 << 20
PURGE_SECONDS_MAX: Final = 60.0
THREADS_MAX: Final = 2 * VERBS_AT_ONCE  # with those that are reserved for orgs

B = TypeVar("B")
A = TypeVar("A")
T = TypeVar("T")
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Call(Generic[B]):
    """One request. `permit`: whether its token is still one of its org."""

    org: OrgSpec
    body: B
    payload: memoryview
    permit: Permit


class CallerApi:
    """The routes of all verbs. Their handlers run in threads, since hashing and moving take long."""

    def __init__(self, shim: Shim) -> None:
        self._shim = shim
        self._admission = OrgAdmission(shim)
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="verb")
        prompts, objects = PromptVerbs(shim, self._admission), ObjectVerbs(shim, self._admission)
        self._routes: list[tuple[Verb[Any, Any], Handler]] = [
            self._route(verbs.QUERY, prompts.query),
            self._route(verbs.EXPLAIN, prompts.explain),
            self._route(verbs.LOAD, prompts.load),
            self._route(verbs.STORE, prompts.store),
            self._route(verbs.PREFETCH, prompts.prefetch),
            self._route(verbs.COMPUTED, prompts.computed),
            self._route(verbs.DELETE, prompts.delete),
            self._route(verbs.SET_PRIORITY, prompts.set_priority),
            self._route(verbs.SET_TTL, prompts.set_ttl),
            self._route(verbs.SET_DISPLACEMENT, prompts.set_displacement),
            self._route(verbs.PURGE, prompts.purge),
            self._route(verbs.OBJECTS_EXIST, objects.exist),
            self._route(verbs.GET_OBJECTS, objects.get),
            self._route(verbs.PUT_OBJECTS, objects.put),
            self._route(verbs.REMOVE_OBJECTS, objects.remove),
        ]
        self.verbs = [verb for verb, _ in self._routes]

    def routes(self, guard: Callable[[Callable[..., Any]], Any]) -> Iterator[Route]:
        """`guard` admits callers to a handler, see `kvss_agent.http.api.guarded`."""
        for verb, handler in self._routes:
            yield Route(f"/v1/{verb.path}", guard(handler), methods=["POST"])

    def owner(self, request: Request) -> str | None:
        """Whose request this is; None without a token of an org."""
        org = self._shim.caller(bearer(request))
        return owner_of(org.name) if org else None

    def _route(
        self, verb: Verb[B, A], handle: Callable[[Call[B]], A | Response]
    ) -> tuple[Verb[Any, Any], Handler]:
        async def answer(request: Request) -> Response:
            org = self._shim.caller(bearer(request))
            if org is None:
                raise Refused(HTTPStatus.UNAUTHORIZED, "A bearer token is required.")
            permit = self._shim.permit(bearer(request), org)
            if verb.sends_bytes:
                body = self._admission.body(org, request, binary.KV_BYTES_MAX)
                async with body as raw, self._admission.turn(org):
                    return await self._run(lambda: carry_out(*verb.unpack(raw), org, permit))
            async with self._admission.body(org, request, HEADER_BYTES_MAX) as raw:
                content, _ = await self._unpack(org, verb, raw)
            async with self._admission.turn(org):
                return await self._run(lambda: carry_out(content, memoryview(b""), org, permit))

        def carry_out(body: B, payload: memoryview, org: OrgSpec, permit: Permit) -> Response:
            found = handle(Call(org, body, payload, permit))
            if verb.sends_bytes and not permit():
                raise Refused(
                    HTTPStatus.UNAUTHORIZED,
                    "This token has been removed from its org: what came with it was not stored.",
                )
            if isinstance(found, Response):
                return found
            is_pending = isinstance(found, Receipt) and not found.done  # some slot is not empty yet
            return as_json(found, HTTPStatus.ACCEPTED if is_pending else HTTPStatus.OK)

        return verb, answer

    async def _unpack(self, org: OrgSpec, verb: Verb[B, A], raw: memoryview) -> tuple[B, memoryview]:
        """Decode a body. A long one takes a tenth of a second and more, so that is done in a thread, and
        one at a time for each org. Raises Invalid and Refused."""
        if len(raw) <= BODY_BYTES_LEAST:
            return verb.unpack(raw)
        async with self._admission.reader(org):
            return await self._run(partial(verb.unpack, raw))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class PromptVerbs:
    """Verbs of prompts and of whole orgs."""

    def __init__(self, shim: Shim, admission: OrgAdmission) -> None:
        self._shim = shim
        self._admission = admission

    def query(self, call: Call[verbs.PromptBody]) -> verbs.QueryAnswer:
        prompt = self._prompt(call.org, call.body)
        return verbs.QueryAnswer(self._shim.driver.query(prompt), prompt.tokens)

    def explain(self, call: Call[verbs.PromptBody]) -> dict[str, list[ColumnState]]:
        return dict(self._shim.driver.explain(self._prompt(call.org, call.body)))

    def load(self, call: Call[verbs.LoadBody]) -> Response:
        prompt, driver = self._prompt(call.org, call.body), self._shim.mover
        there = prompt.tokens if call.body.seconds else driver.query(prompt)

        def make() -> bytes:
            kv = binary.Kv(driver.layout, prompt.tokens)
            loaded = driver.load(prompt, kv.part, seconds=call.body.seconds)
            return kv.encode(loaded.tokens)

        return self._admission.answer(call.org, binary.bytes_of(driver.layout, there), make)

    def store(self, call: Call[verbs.StoreBody]) -> Stored:
        body, driver = call.body, self._shim.mover
        prompt = self._prompt(call.org, body)
        verified = prompt.tokens if body.verified is None else body.verified
        if verified > prompt.tokens:
            raise Invalid(f"The body has {prompt.tokens} tokens; {verified} can't be verified.")
        if unknown := set(body.first_tokens) - {group.name for group in driver.layout.groups}:
            raise Invalid(f"There is no group {min(unknown)}.")
        first = [body.first_tokens.get(group.name, 0) for group in driver.layout.groups]
        if max(first) > verified:
            raise Invalid(f"KV from token {max(first)} on is behind the {verified} verified tokens.")
        states = body.states
        if any(one >= next_one for one, next_one in pairwise([0, *states, verified + 1])):
            raise Invalid(f"`states` are numbers from 1 to {verified}, each larger than the one before.")
        if states and not driver.layout.has_states:
            raise Invalid("This driver's layout has no state groups.")
        kv = binary.Kv(driver.layout, verified, call.payload, first, states)
        return driver.store(prompt, verified, kv.part, body.rules, first, call.permit, states)

    def prefetch(self, call: Call[verbs.PrefetchBody]) -> verbs.PrefetchAnswer:
        return verbs.PrefetchAnswer(self._shim.driver.prefetch(call.org.name, call.body.continue_id))

    def computed(self, call: Call[verbs.ComputedBody]) -> BreakEvenTokens:
        self._shim.driver.computed(call.org.name, call.body.tokens, call.body.seconds)
        return self._shim.driver.statistics.break_even_of(call.org.name)

    def delete(self, call: Call[verbs.DeleteBody]) -> Receipt:
        prompt = self._prompt(call.org, call.body)
        return self._shim.driver.removals.delete(
            prompt, shared=call.body.shared, seconds=PURGE_SECONDS_MAX
        )

    def set_priority(self, call: Call[verbs.PriorityBody]) -> verbs.ColumnsAnswer:
        prompt = self._prompt(call.org, call.body)
        return verbs.ColumnsAnswer(self._shim.driver.set_priority(prompt, call.body.priority))

    def set_ttl(self, call: Call[verbs.TtlBody]) -> verbs.ColumnsAnswer:
        prompt = self._prompt(call.org, call.body)
        return verbs.ColumnsAnswer(self._shim.driver.set_ttl(prompt, call.body.seconds))

    def set_displacement(self, call: Call[verbs.DisplacementBody]) -> verbs.DisplacementBody:
        self._shim.driver.set_displacement(call.org.name, call.body.displacement)
        return call.body

    def purge(self, call: Call[verbs.PurgeBody]) -> Receipt:
        org, adapter = call.org, call.body.adapter
        namespace = None if adapter is None else self._shim.keys(org, adapter).namespace
        tag = org.tag
        return self._shim.driver.removals.purge(org.name, namespace, tag=tag, seconds=PURGE_SECONDS_MAX)

    def _prompt(self, org: OrgSpec, body: verbs.PromptBody) -> Prompt:
        keys = self._shim.keys(org, body.adapter)
        _check_namespace(keys, body.namespace)
        return keys.prompt(body.tokens, body.request)


class ObjectVerbs:
    """Verbs of objects."""

    def __init__(self, shim: Shim, admission: OrgAdmission) -> None:
        self._shim = shim
        self._admission = admission

    def exist(self, call: Call[verbs.FindBody]) -> verbs.ExistAnswer:
        """A caller without keys asks only for how large a value may be."""
        objects = self._shim.objects(call.org)
        found = objects.exists(self._keys(call), call.body.seconds)
        return verbs.ExistAnswer(found, min(objects.value_bytes_max, binary.KV_BYTES_MAX))

    def get(self, call: Call[verbs.FindBody]) -> Response:
        """Returns only as many as go at once; the others are missed, and may be asked for again."""
        objects, keys = self._shim.objects(call.org), self._keys(call)
        size = objects.value_bytes_max
        most = min(binary.KV_BYTES_MAX, self._admission.org_bytes_max) // size

        def make() -> bytes:
            places = [memoryview(bytearray(size)) for _ in keys[:most]]
            lengths = objects.get(keys[:most], places, call.body.seconds)
            values = [place[:length] for place, length in zip(places, lengths, strict=True) if length]
            head = binary.ObjectsHead(lengths=[*lengths, *[None] * (len(keys) - len(lengths))])
            return binary.pack(head, *values)

        return self._admission.answer(call.org, len(keys[:most]) * size, make)

    def put(self, call: Call[verbs.PutBody]) -> verbs.PutAnswer:
        body, values = call.body, call.payload
        if len(body.lengths) != len(body.keys) or sum(body.lengths) != len(values):
            raise Invalid(
                f"The header has {len(body.keys)} keys and {len(body.lengths)} lengths, which add up to "
                f"{sum(body.lengths)} bytes; {len(values)} bytes followed."
            )
        named, cut = self._named(call), binary.cut(values, body.lengths)
        try:
            stored = self._shim.mover.objects.put(named, cut, body.rules, call.permit)
        except TooLarge as error:
            raise Invalid(str(error)) from error
        return verbs.PutAnswer(stored)

    def remove(self, call: Call[verbs.ObjectsBody]) -> Receipt:
        removals = self._shim.driver.removals
        return removals.delete(self._named(call), shared=True, seconds=PURGE_SECONDS_MAX)

    def _named(self, call: Call[verbs.PutBody] | Call[verbs.ObjectsBody]) -> Named:
        self._shim.objects(call.org)  # refused by a driver of prefixes
        return self._shim.keys(call.org).named(self._keys(call))

    def _keys(
        self, call: Call[verbs.FindBody] | Call[verbs.PutBody] | Call[verbs.ObjectsBody]
    ) -> list[bytes]:
        _check_namespace(self._shim.keys(call.org), call.body.namespace)
        return [bytes.fromhex(key) for key in call.body.keys]


def _check_namespace(keys: Keys, namespace: str) -> None:
    """Raises Invalid."""
    if namespace and namespace != keys.namespace.digest().hex():
        raise Invalid("This driver's KV is of another model, revision, dtype, layout or shape.")
