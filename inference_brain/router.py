"""The decision, put together: tokens, keys, cache maps and loads of a request become candidates, and one
of them is chosen.

    asking = Asking("req-1", org, model, request, arrived=clock(), ...)
    await router.prepare(asking)             # tokens and keys; ApiError for a prompt that is too long
    place = await router.enter(asking)       # limits and queues; ApiError
    routed = router.choose(asking)           # NoReplica; again with those that failed, in `without`
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from inference_brain import metrics
from inference_brain.admission import Admission, Followed, Place, Rejected, Room, Ticket
from inference_brain.api.errors import RATE_LIMITED, SERVER, ApiError, too_long, unavailable
from inference_brain.api.requests import Chat, Completion, Generation
from inference_brain.choice import Asked, Candidate, Choice, Flights, ModelRates, choose
from inference_brain.choice.candidates import IDLE, Load
from inference_brain.choice.rates import TOKEN
from inference_brain.counts import Counts
from inference_brain.desired import Desired, OrgSpec, ServedModel
from inference_brain.maps import CacheMaps, DriverPlace, Hit
from inference_brain.prompts import Prompts
from inference_brain.tokens.turns import Tokens
from inference_brain.upstream.fleet import Fleet, Replica
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt, isolation_tag

CHARACTERS_PER_TOKEN: Final = 4  # of a prompt that is not tokenized here, about
AFFINITY_COLUMNS: Final = 16  # that prompts have to share to belong together
AFFINITY_CHARACTERS: Final = AFFINITY_COLUMNS * COLUMN_TOKENS * CHARACTERS_PER_TOKEN
REQUESTS_AT_ONCE: Final = 256  # of one replica
PREFILL_SECONDS: Final = 0.25  # of work that a replica may have before it
PREFILL_TOKENS_MIN: Final = 4096  # two steps of an engine with chunked prefill
KEYS_MAX: Final = 4096  # makers of keys that are kept
PREVIEW_SECONDS: Final = 0.0005  # between two requests, at the highest rates
ROOM_SECONDS: Final = 0.02  # that the room of a model's replicas is known, unless one changes


class NoReplica(Exception):
    """No replica can take the request. A sentence."""


class Preview(NamedTuple):
    """A choice that was made to know what a request asks for. It holds if the request has its place at
    once."""

    usable: Sequence[Replica]
    choice: Choice
    at: float
    seconds: float  # that it took


@dataclass(slots=True, eq=False)
class Asking:
    """A request on its way through the brain. `arrived` and all times of it are of a monotonic clock;
    `at` is in seconds since 1970. `tokens`: of its prompt, or of its first one; None where they are not
    known."""

    id: str
    org: OrgSpec
    model: ServedModel
    request: Generation
    arrived: float
    at: float
    deadline_seconds: float | None = None
    size: int = 0  # bytes of its body
    tokens: Tokens | None = None
    prompt_tokens: int = 0  # of all its prompts; an estimate if they are not known
    prompts: Mapping[ModelSpec, Prompt] = field(default_factory=dict)
    affinity: bytes = b""
    preview: Preview | None = None
    followed: Followed | None = None  # where its prefix was computed just now


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a request goes. `excluded`: replicas that were no candidates, and why."""

    replica: Replica
    choice: Choice
    seconds: float  # that the decision took
    excluded: Mapping[str, str]


class Router:
    """Used from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        maps: CacheMaps,
        prompts: Prompts,
        counts: Counts,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        name: str = "brain",
    ) -> None:
        self.fleet = fleet
        self.maps = maps
        self.prompts = prompts
        self.counts = counts
        self.admission = Admission(self, name=name, loads=self._loads, clock=clock)
        self.flights: dict[str, Flights] = {}
        self.rates: dict[str, ModelRates] = {}
        self.others: Callable[[tuple[str, str]], Load] = lambda _: IDLE  # sent by no brain at all
        self._clock = clock
        self._wall = wall
        self._rng = rng or random.Random()  # noqa: S311 - which replica is tried is no secret
        self._keys: dict[tuple[str, bytes, ModelSpec], Keys] = {}
        self._rooms: dict[str, tuple[float, Room]] = {}
        fleet.on_change(self._changed)

    def follow(self, told: Desired) -> None:
        """Take over a document."""
        for model in told.models:
            names = frozenset(one.name for one in model.replicas)
            self.flights.setdefault(model.name, Flights()).keep_only(names)
            self.rates.setdefault(model.name, ModelRates()).keep_only(names)
        served = {model.name for model in told.models}
        self.flights = {name: one for name, one in self.flights.items() if name in served}
        self.rates = {name: one for name, one in self.rates.items() if name in served}
        self._keys.clear()
        drivers = [one.driver for model in told.models for one in model.replicas if one.driver]
        models = {one.model for one in drivers}
        self.maps.follow(
            {one.name: DriverPlace(f"driver:{one.name}", one.model) for one in drivers},
            (
                (isolation_tag(org.name, org.secret_of(model.name)), model.namespace())
                for model in models
                for org in told.orgs
            ),
        )
        self.prompts.follow(told.models)
        self.fleet.follow(told)

    def sent(self, key: tuple[str, str]) -> int:
        """How many requests of all brains are at a replica of a model, as far as it is known."""
        model, name = key
        flights = self.flights.get(model)
        loads = [self.admission.elsewhere.get(key, IDLE)]
        if flights:
            loads.append(flights.load(name, self._clock()))
        return sum(load.running + load.waiting for load in loads)

    def _loads(self) -> Mapping[str, Mapping[str, Load]]:
        """What this brain has sent, for the others."""
        now = self._clock()
        return {model: flights.loads(now) for model, flights in self.flights.items()}

    # Before the queue

    async def prepare(self, asking: Asking) -> None:
        """Tokens and keys of its prompt. Raises ApiError for a prompt that is none, or too long."""
        request, model = asking.request, asking.model
        started = self._clock()
        found = await self.prompts.of(asking.org.name, model, request)
        asking.tokens = tokens = found.tokens
        asking.prompt_tokens = found.total or max(1, asking.size // CHARACTERS_PER_TOKEN)
        if tokens is None:
            asking.affinity = _affinity_of_text(asking)
            return
        self.counts.time(metrics.TOKENIZE, self._clock() - started)
        self.counts.add(metrics.TOKENIZED, "reused", amount=tokens.reused)
        self.counts.add(metrics.TOKENIZED, "computed", amount=len(tokens) - tokens.reused)
        answer = request.answer_tokens_max or 0
        if len(tokens) + answer > model.tokens_max:
            param = "messages" if isinstance(request, Chat) else "prompt"
            raise too_long(len(tokens), answer, model.tokens_max, param)
        asking.prompts = {
            spec: tokens.prompt(self._keys_of(asking.org, spec), asking.id)
            for spec in dict.fromkeys(
                one.driver.model for one in model.replicas if one.driver is not None
            )
        }
        asking.affinity = _affinity(asking) or _affinity_of_text(asking)

    def _keys_of(self, org: OrgSpec, spec: ModelSpec) -> Keys:
        secret = org.secret_of(spec.name)
        found = self._keys.get((org.name, secret, spec))
        if found is None:
            if len(self._keys) >= KEYS_MAX:
                self._keys.clear()
            found = Keys(org.name, secret, spec.namespace(), spec.unit_tokens)
            self._keys[org.name, secret, spec] = found
        return found

    # The queue

    async def enter(self, asking: Asking) -> Place:
        """Wait for a place. Raises ApiError."""
        if not self.fleet.of(asking.model.name):
            raise unavailable("The model has no replica.", "no_replica", 30)
        try:
            place = await self.admission.enter(self._ticket(asking))
        except Rejected as error:
            self.counts.add(metrics.REJECTED, asking.org.name, error.code)
            retry = {} if error.header is None else {"retry-after": error.header}
            kind = RATE_LIMITED if error.status == 429 else SERVER
            raise ApiError(
                error.status, error.message, kind=kind, code=error.code, headers=retry
            ) from None
        asking.followed = place.followed
        self.counts.time(metrics.QUEUE, place.waited_seconds, asking.org.name)
        return place

    def _ticket(self, asking: Asking) -> Ticket:
        request = asking.request
        started = time.perf_counter()
        usable = self.fleet.usable(asking.model.name)
        candidates = self._candidates(asking, usable)
        cached = max((one.hit_tokens + one.tier2_tokens for one in candidates), default=0)
        expected = None
        if candidates:
            choice = self._chosen(asking, candidates)
            expected = choice.chosen
            seconds = time.perf_counter() - started
            asking.preview = Preview(usable, choice, self._clock(), seconds)
        answer = request.answer_tokens_max
        if answer is None:
            answer = max(1, asking.model.tokens_max - asking.prompt_tokens)
        return Ticket(
            org=asking.org.name,
            limits=asking.org.limits,
            model=asking.model.name,
            prompt_tokens=asking.prompt_tokens,
            answer_tokens_max=answer * request.answers,
            uncached_tokens=max(1, asking.prompt_tokens - cached),
            priority=request.wish,
            deadline=asking.deadline_seconds,
            first_token_seconds=expected.fetch_seconds + expected.compute_seconds if expected else 0.0,
            chain=self._chain(asking),
            chain_tokens=COLUMN_TOKENS,
            compute_rate=_compute_rate(candidates),
        )

    def _changed(self) -> None:
        self._rooms.clear()
        self.admission.changed()

    def room(self, model: str) -> Room:
        """What all replicas of a model can have at once: the capacity that admission asks for."""
        until, room = self._rooms.get(model, _NO_ROOM)
        if self._clock() >= until:
            room = self._room(model)
            self._rooms[model] = self._clock() + ROOM_SECONDS, room
        return room

    def _room(self, model: str) -> Room:
        replicas = self.fleet.usable(model)
        rates = self.rates.get(model)
        if rates is None:  # it is served no more, and its last requests leave
            return Room(0, 0)
        tokens = sum(
            max(PREFILL_TOKENS_MIN, int(PREFILL_SECONDS / max(rates.of(one.name).seconds[TOKEN], 1e-9)))
            for one in replicas
        )
        return Room(REQUESTS_AT_ONCE * len(replicas), tokens, len(replicas))

    # The decision

    def choose(self, asking: Asking, without: Collection[str] = ()) -> Routed:
        """Where it goes now. Raises NoReplica."""
        started = time.perf_counter()
        model = asking.model.name
        preview, asking.preview = asking.preview, None
        seconds = 0.0
        if preview and not without and self._clock() - preview.at < PREVIEW_SECONDS:
            usable, choice, seconds = preview.usable, preview.choice, preview.seconds
        else:
            usable = self.fleet.usable(model, without)
            if not usable:
                raise NoReplica(self._why_none(model, without))
            choice = self._chosen(asking, self._candidates(asking, usable))
        replica = next(one for one in usable if one.name == choice.replica)
        seconds += time.perf_counter() - started
        self.counts.time(metrics.DECISION, seconds)
        return Routed(replica, choice, seconds, self._excluded(model, usable, without))

    def _chosen(self, asking: Asking, candidates: Sequence[Candidate]) -> Choice:
        asked = Asked(
            asking.prompt_tokens,
            asking.affinity,
            asking.org.name,
            asking.request.answer_tokens_max or 0,
            asking.id,
        )
        mode = self.rates[asking.model.name].mode
        return choose(asked, candidates, self._clock(), self._rng, mode)

    def _candidates(self, asking: Asking, replicas: Sequence[Replica]) -> list[Candidate]:
        model, now = asking.model.name, self._clock()
        rates, flights = self.rates[model], self.flights[model]
        elsewhere = self.admission.elsewhere
        made = []
        for replica, hit in zip(replicas, self._hits(asking, replicas), strict=True):
            name = replica.name
            load = flights.load(name, now)
            if other := elsewhere.get((model, name)):
                load = load.plus(other)
            if replica.spec.driver is None and (strange := self.others((model, name))) is not IDLE:
                load = load.plus(strange)
            known = hit or _UNKNOWN
            made.append(
                Candidate(
                    name,
                    rates.of(name),
                    min(max(known.tokens, _followed(asking, name)), asking.prompt_tokens),
                    min(known.tier2_tokens, asking.prompt_tokens),
                    load=load,
                    is_guess=hit is None,
                )
            )
        return made

    def _hits(self, asking: Asking, replicas: Sequence[Replica]) -> Sequence[Hit | None]:
        if not asking.prompts:
            return [None] * len(replicas)
        drivers = [one.spec.driver.name if one.spec.driver else "" for one in replicas]
        started = time.perf_counter()
        found = self.maps.hits(drivers, asking.prompts, self._wall())
        self.counts.time(metrics.LOOKUP, time.perf_counter() - started)
        return found

    def _excluded(
        self, model: str, usable: Sequence[Replica], without: Collection[str]
    ) -> dict[str, str]:
        now, names = self._clock(), {one.name for one in usable}
        return {
            one.name: "failed" if one.name in without else one.state(now)
            for one in self.fleet.of(model)
            if one.name not in names
        }

    def _why_none(self, model: str, without: Collection[str]) -> str:
        states = self._excluded(model, (), without)
        if not states:
            return "The model has no replica."
        counted = {state: sum(1 for one in states.values() if one == state) for state in states.values()}
        told = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in counted.items())
        return f"No replica of this model can take the request now: {told}."

    def _chain(self, asking: Asking) -> Sequence[bytes]:
        prompt = next(iter(asking.prompts.values()), None)
        return prompt.keys if prompt else ()


_UNKNOWN: Final = Hit(0)
_NO_ROOM: Final = -math.inf, Room(0, 0)


def _followed(asking: Asking, replica: str) -> int:
    """Tokens that the replica has computed just now, for a request that this one has waited for. Its
    cache map may not have them yet."""
    return asking.followed.tokens if asking.followed and asking.followed.replica == replica else 0


def _compute_rate(candidates: Sequence[Candidate]) -> float:
    """Tokens of a prompt that the fastest of them computes in a second; 0 if there is none."""
    fastest = min((one.rates.seconds[TOKEN] for one in candidates), default=0.0)
    return 1.0 / fastest if fastest else 0.0


def _affinity(asking: Asking) -> bytes:
    """The key of the first columns: of all that prompts have, if they have fewer. Empty without a whole
    column."""
    prompt = next(iter(asking.prompts.values()), None)
    if prompt is None or not prompt.keys:
        return b""
    return prompt.maker.tag + prompt.keys[min(AFFINITY_COLUMNS, len(prompt.keys)) - 1]


def _affinity_of_text(asking: Asking) -> bytes:
    """The same for prompts without keys: of as many characters."""
    request = asking.request
    text = ""
    if isinstance(request, Completion):
        text = str(request.prompts[0])[:AFFINITY_CHARACTERS]
    elif isinstance(request, Chat):
        for message in request.messages:
            text += str(message.get("content"))[:AFFINITY_CHARACTERS]
            if len(text) >= AFFINITY_CHARACTERS:
                break
    tag = isolation_tag(asking.org.name, asking.org.secret)
    return tag + xxh3_128_digest(tag + text[:AFFINITY_CHARACTERS].encode(errors="replace"))
