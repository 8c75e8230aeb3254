"""The decision, put together: tokens, keys, cache maps and loads of a request become candidates, and one
of them is chosen.

    asking = Asking("req-1", org, model, request, arrived=clock(), ...)
    await router.prepare(asking)             # tokens and keys; ApiError for a prompt that is too long
    place = await router.enter(asking)       # limits and queues; ApiError
    routed = router.choose(asking)           # NoReplica; again with those that failed, in `without`
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from inference_brain import metrics
from inference_brain.admission import Admission, Place, Rejected, Room, Ticket
from inference_brain.admission.ticket import Reason
from inference_brain.api.errors import RATE_LIMITED, SERVER, ApiError, too_long, unavailable
from inference_brain.api.requests import Chat
from inference_brain.asking import (
    CHARACTERS_PER_TOKEN,
    Asking,
    NoReplica,
    Preview,
    Routed,
    affinity,
    affinity_of_text,
)
from inference_brain.choice import Asked, Candidate, Choice, Flights, ModelRates, SentPrefixes, choose
from inference_brain.choice.candidates import IDLE, Load, Path
from inference_brain.choice.choice import Estimate
from inference_brain.choice.rates import TOKEN
from inference_brain.counts import Counts
from inference_brain.desired import Desired, DriverSpec, OrgSpec, ServedModel
from inference_brain.maps import CacheMaps, DriverPlace, GuessedMap, Siblings
from inference_brain.maps.siblings import Lent
from inference_brain.prompts import Prompts
from inference_brain.recalls import TOKENS_MIN, Recalls
from inference_brain.upstream.fleet import Fleet, Replica
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt, isolation_tag

REQUESTS_AT_ONCE: Final = 256  # of one replica
PREFILL_SECONDS: Final = 0.25  # of work that a replica may have before it
PREFILL_TOKENS_MIN: Final = 4096  # two steps of an engine with chunked prefill
PREVIEW_SECONDS: Final = 0.002  # after which loads and maps are looked at again
ROOM_SECONDS: Final = 0.05  # that what replicas can take is taken to be the same
MAP_SECONDS: Final = 2.0  # until a driver's map has reached a brain, at the most
KEYS_MAX: Final = 4096  # makers of keys that are kept


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
        self._keys: dict[tuple[str, bytes, ModelSpec | str], Keys] = {}
        self._guessed: dict[tuple[str, str], GuessedMap] = {}  # by model and replica
        self._sent = SentPrefixes()
        self._rooms: dict[str, tuple[float, Room]] = {}  # until when, by model
        self._decisions = 0
        self._siblings = Siblings({})
        self.recalls: Recalls | None = None  # until there is a Redis
        fleet.on_change(self._changed)

    def _changed(self) -> None:
        """Replicas have come, gone or returned."""
        self._rooms.clear()
        for replica in self.fleet:
            if replica.health.unreachable:  # when it returns, its cache is empty
                self._guessed.pop((replica.model, replica.name), None)
        self.admission.changed()

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
        self._siblings = Siblings(_permitted(drivers))
        self.prompts.follow(told.models)
        self.fleet.follow(told)
        present = {(one.model, one.name) for one in self.fleet}
        self._guessed = {key: one for key, one in self._guessed.items() if key in present}

    def renew(self, key: tuple[str, str]) -> None:
        """Another process serves this replica of a model. It has the driver, and so the cache map, of
        the one before it; what was sent to that one is no load of it."""
        model, name = key
        if flights := self.flights.get(model):
            flights.renew(name)

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
            asking.affinity = affinity_of_text(asking)
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
        if any(one.driver is None for one in model.replicas):
            asking.guess = tokens.prompt(self._guess_keys_of(asking.org, model))
        asking.affinity = affinity(asking) or affinity_of_text(asking)

    def _keys_of(self, org: OrgSpec, spec: ModelSpec) -> Keys:
        secret = org.secret_of(spec.name)
        found = self._keys.get((org.name, secret, spec))
        if found is None:
            if len(self._keys) >= KEYS_MAX:
                self._keys.clear()
            found = Keys(org.name, secret, spec.namespace(), spec.unit_tokens)
            self._keys[org.name, secret, spec] = found
        return found

    def _guess_keys_of(self, org: OrgSpec, model: ServedModel) -> Keys:
        """For what is remembered here only: a model's name stands for all that there may be to it."""
        found = self._keys.get((org.name, org.secret, model.name))
        if found is None:
            found = Keys(org.name, org.secret, Namespace(model.name, "", "", ""))
            self._keys[org.name, org.secret, model.name] = found
        return found

    # The queue

    async def enter(self, asking: Asking) -> Place:
        """Wait for a place. Raises ApiError."""
        if not self.fleet.of(asking.model.name):
            raise unavailable("The model has no replica.", "no_replica", 30)
        try:
            ticket = self._ticket(asking)
            place = await self.admission.enter(ticket, lambda: self._recall_ahead(asking))
        except Rejected as error:
            self.counts.add(metrics.REJECTED, asking.org.name, error.code)
            retry = {} if error.header is None else {"retry-after": error.header}
            kind = RATE_LIMITED if error.status == 429 else SERVER
            message = error.message
            if error.code == Reason.NO_REPLICA:
                message = f"{message} {self._why_none(asking.model.name, ())}"
            raise ApiError(error.status, message, kind=kind, code=error.code, headers=retry) from None
        asking.followed = place.followed
        self.counts.time(metrics.QUEUE, place.waited_seconds, asking.org.name)
        return place

    def _recall_ahead(self, asking: Asking) -> None:
        """It waits: where it is likely to go, tier 2 or a sibling is asked for it meanwhile."""
        if self.recalls is None or asking.preview is None:
            return
        chosen = asking.preview.choice.chosen
        replica = self.fleet.replica(asking.model.name, chosen.name)
        driver = replica.spec.driver if replica else None
        if driver is None or (prompt := asking.prompts.get(driver.model)) is None:
            return
        candidate = chosen.candidate
        if chosen.sibling:
            # What tier 2 has beyond is recalled when the engine asks: of one prompt one thing at a time.
            self._borrow(driver, prompt, chosen)
        else:
            self.recalls.ask(driver.name, prompt, candidate.hit_tokens, candidate.tier2_tokens)

    def _borrow(self, driver: DriverSpec, prompt: Prompt, of: Estimate) -> None:
        """Ask the driver for what its estimate counts on."""
        if self.recalls is not None and of.sibling:
            hit_tokens = of.candidate.hit_tokens
            self.recalls.borrow(driver.name, prompt, hit_tokens, of.borrowed_tokens, of.sibling)

    def _ticket(self, asking: Asking) -> Ticket:
        request = asking.request
        started = time.perf_counter()
        replicas = self.fleet.usable(asking.model.name)
        candidates = self._candidates(asking, replicas)
        cached = max(
            (one.hit_tokens + max(one.tier2_tokens, one.sibling_tokens) for one in candidates), default=0
        )
        expected = None
        if candidates:
            choice = self._chosen(asking, candidates)
            expected = choice.chosen
            seconds = time.perf_counter() - started
            asking.preview = Preview(choice, replicas, self._decisions, self._clock(), seconds)
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

    def room(self, model: str) -> Room:
        """What all replicas of a model can have at once: the capacity that admission asks for."""
        now = self._clock()
        until, room = self._rooms.get(model, (0.0, _NO_ROOM))
        if now >= until:
            room = self._room(model)
            self._rooms[model] = now + ROOM_SECONDS, room
        return room

    def _room(self, model: str) -> Room:
        replicas = self.fleet.usable(model)
        rates = self.rates.get(model)
        if rates is None:  # it is served no more, and its last requests leave
            return Room(0, 0)
        tokens = sum(
            max(PREFILL_TOKENS_MIN, int(PREFILL_SECONDS * rates.pace(one.name))) for one in replicas
        )
        return Room(REQUESTS_AT_ONCE * len(replicas), tokens, len(replicas))

    # The decision

    def choose(self, asking: Asking, without: Collection[str] = ()) -> Routed:
        """Where it goes now. Raises NoReplica."""
        started = time.perf_counter()
        model, preview, asking.preview = asking.model.name, asking.preview, None
        if preview and not without and self._holds(preview) and not asking.followed:
            choice, usable = preview.choice, preview.replicas
            started -= preview.seconds
        else:
            usable = self.fleet.usable(model, without)
            if not usable:
                raise NoReplica(self._why_none(model, without))
            choice = self._chosen(asking, self._candidates(asking, usable))
        self._decisions += 1
        replica = next(one for one in usable if one.name == choice.replica)
        seconds = time.perf_counter() - started
        self.counts.time(metrics.DECISION, seconds)
        return Routed(replica, choice, seconds, self._excluded(model, usable, without))

    def _holds(self, preview: Preview) -> bool:
        """Whether nothing has been decided since, and hardly any time has passed."""
        return preview.decision == self._decisions and self._clock() - preview.at < PREVIEW_SECONDS

    def note_sent(self, asking: Asking, routed: Routed) -> None:
        """The request is about to be sent there: what will be cached of it is remembered, until the map
        of its driver has it; without a driver, what may be. What it counts on a sibling for, its driver
        is asked to borrow."""
        replica = routed.replica
        if (driver := replica.spec.driver) is not None:
            if (prompt := asking.prompts.get(driver.model)) is not None:
                self._borrow(driver, prompt, routed.choice.chosen)
                until = self._clock() + routed.choice.chosen.seconds + MAP_SECONDS
                self._sent.add(_place(replica.model, replica.name), prompt.keys, until)
            return
        if asking.guess is None:
            return
        key = replica.model, replica.name
        found = self._guessed.get(key)
        if found is None:
            found = self._guessed[key] = GuessedMap()
        found.sent(asking.guess)

    def forget(self, tags: Collection[bytes]) -> None:
        """Nothing is guessed of columns with these tags."""
        self._keys.clear()
        self._sent.clear()
        for one in self._guessed.values():
            for tag in tags:
                one.forget(tag)

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
        rates.settle(now)
        elsewhere = self.admission.elsewhere
        sent = self._sent_hits(asking, now)
        made = []
        for replica, tokens, tier2_tokens, lent, sibling in zip(
            replicas, *self._hits(asking, replicas), strict=True
        ):
            name = replica.name
            is_guess = tokens < 0
            if is_guess:
                tokens = self._guess(asking, replica)
            load = flights.load(name, now)
            if (other := elsewhere.get((model, name))) is not None:
                load = load.plus(other)
            if replica.spec.driver is None and (strange := self.others((model, name))) is not IDLE:
                load = load.plus(strange)
            found = max(tokens, _followed(asking, name), sent.get(_place(model, name), 0))
            both = min(max(found, tokens + tier2_tokens), asking.prompt_tokens)
            in_memory = min(found, both)
            mirror = self.maps.mirror(replica.spec.driver.name) if replica.spec.driver else None
            more = min(lent, asking.prompt_tokens) - in_memory
            if more < TOKENS_MIN or mirror is None or not (mirror.is_known and mirror.serves):
                more, sibling = 0, ""
            made.append(
                Candidate(
                    name,
                    rates.of(name),
                    in_memory,
                    both - in_memory,
                    Path(mirror.path) if mirror and mirror.path else Path.LOCAL,
                    load,
                    is_guess,
                    more,
                    sibling,
                )
            )
        return made

    def _sent_hits(self, asking: Asking, now: float) -> dict[str, int]:
        """What replicas are computing of it, or have computed and not reported."""
        found: dict[str, int] = {}
        for prompt in asking.prompts.values():
            found |= self._sent.hits(prompt.keys, now)  # a replica has one driver, so one of them
        return found

    def _hits(self, asking: Asking, replicas: Sequence[Replica]) -> _Found:
        """Of each replica, as cache maps say."""
        drivers = [one.spec.driver.name if one.spec.driver else "" for one in replicas]
        count = len(drivers)
        if not asking.prompts:
            return _Found([-1] * count, [0] * count, [0] * count, [""] * count)
        started, now = time.perf_counter(), self._wall()
        # Who can't be asked to borrow counts on nobody.
        asked = self._siblings.asked(drivers) if self.recalls else None
        hits = self.maps.hits(asked.names if asked else drivers, asking.prompts, now)
        lent = Lent([0] * count, [""] * count)
        if asked:
            lent = self._siblings.lent(asked, hits, now, lambda name: self.maps.age(name, now))
        self.counts.time(metrics.LOOKUP, time.perf_counter() - started)
        return _Found(hits.tokens[:count].tolist(), hits.tier2_tokens[:count].tolist(), *lent)

    def _guess(self, asking: Asking, replica: Replica) -> int:
        """What a replica without a map may have: tokens that were sent there before."""
        known = self._guessed.get((replica.model, replica.name))
        return known.hit(asking.guess).tokens if known and asking.guess else 0

    def _excluded(
        self, model: str, usable: Sequence[Replica], without: Collection[str]
    ) -> dict[str, str]:
        if len(usable) == len(self.fleet.of(model)):
            return {}
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


_NO_ROOM: Final = Room(0, 0)


class _Found(NamedTuple):
    """Of each replica: tokens that it has in memory, fewer than none where no map is known; further ones
    in tier 2; and tokens that its best sibling has in memory, with the sibling's name."""

    tokens: list[int]
    tier2_tokens: list[int]
    lent: list[int]
    siblings: list[str]


def _permitted(drivers: Sequence[DriverSpec]) -> dict[str, list[str]]:
    """Whom each may borrow from. Columns of another model or layout have other keys."""
    numbers: dict[ModelSpec, int] = {}  # to compare a model with many others
    models = {one.name: numbers.setdefault(one.model, len(numbers)) for one in drivers}
    return {
        one.name: [other for other in one.siblings if models.get(other) == models[one.name]]
        for one in drivers
    }


def _place(model: str, replica: str) -> str:
    return f"{model}\0{replica}"


def _followed(asking: Asking, replica: str) -> int:
    """Tokens that the replica has computed just now, for a request that this one has waited for. Its
    cache map may not have them yet."""
    return asking.followed.tokens if asking.followed and asking.followed.replica == replica else 0


def _compute_rate(candidates: Sequence[Candidate]) -> float:
    """Tokens of a prompt that the fastest of them computes in a second; 0 if there is none."""
    fastest = min((one.rates.seconds[TOKEN] for one in candidates), default=0.0)
    return 1.0 / fastest if fastest else 0.0
