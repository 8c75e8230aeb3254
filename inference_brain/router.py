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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple
from weakref import WeakSet

import numpy as np

from inference_brain import metrics
from inference_brain.admission import Admission, Place, Rejected, Room, Ticket
from inference_brain.admission.ticket import Reason
from inference_brain.api.errors import RATE_LIMITED, SERVER, ApiError, too_long, unavailable
from inference_brain.api.requests import Chat
from inference_brain.asking import (
    Asking,
    NoReplica,
    Preview,
    Routed,
    about,
    affinity,
    affinity_of_text,
    tag_of,
)
from inference_brain.choice import Asked, Candidate, Choice, Flights, ModelRates, SentPrefixes, choose
from inference_brain.choice.candidates import IDLE, Load, Path
from inference_brain.choice.choice import Estimate
from inference_brain.choice.columns import Many, Queues
from inference_brain.choice.rates import TOKEN_SECONDS_MIN
from inference_brain.counts import Counts
from inference_brain.desired import Desired, DriverSpec, OrgSpec, ServedModel
from inference_brain.maps import CacheMaps, DriverPlace, GuessedMap, Hits, Siblings
from inference_brain.maps.siblings import Lent
from inference_brain.prompts import Prompts
from inference_brain.recalls import TOKENS_MIN, Recalls, Result
from inference_brain.standing import Found, Standing
from inference_brain.upstream.fleet import Fleet, Numbers, Replica, Roster
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt, isolation_tag

REQUESTS_AT_ONCE: Final = 256  # of one replica
PREFILL_SECONDS: Final = 0.25  # of work that a replica may have before it
PREFILL_TOKENS_MIN: Final = 4096  # two steps of an engine with chunked prefill
PREVIEW_SECONDS: Final = 0.002  # after which loads and maps are looked at again
ROOM_SECONDS: Final = 0.05  # that what replicas can take is taken to be the same
MAP_SECONDS: Final = 2.0  # until a driver's map has reached a brain, at the most
KEYS_MAX: Final = 4096  # makers of keys that are kept


class _Kinds(NamedTuple):
    """What the replicas of a model report of their caches: in which models' columns; and whether there
    are some that report nothing."""

    of: ServedModel
    specs: Sequence[ModelSpec]
    has_others: bool


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
        self._guessed: dict[Replica, GuessedMap] = {}
        self._sent = SentPrefixes()
        self._rooms: dict[str, tuple[float, Room]] = {}  # until when, by model
        self._decisions = 0
        self._siblings = Siblings({})
        self._standings: dict[str, Standing] = {}  # of models
        self._kinds: dict[str, _Kinds] = {}  # of models
        self.recalls: Recalls | None = None  # until there is a Redis
        self._prepared: WeakSet[Asking] = WeakSet()  # and not over yet
        fleet.on_change(self._changed)

    def _changed(self) -> None:
        """Replicas have come, gone or returned."""
        self._rooms.clear()
        self._guessed = {of: one for of, one in self._guessed.items() if self._may_have_cache(of)}
        self.admission.changed()

    def _may_have_cache(self, replica: Replica) -> bool:
        """Not if it can't be reached: when it returns, its cache is empty, as is that of another process
        of its name."""
        is_here = self.fleet.replica(replica.model, replica.name) is replica
        return is_here and not replica.health.unreachable

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
        self._standings.clear()
        self._kinds.clear()
        self.prompts.follow(told.models)
        self.fleet.follow(told)

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
        asking.prompt_tokens = found.total or min(model.tokens_max, about(request))
        self._prepared.add(asking)
        _, specs, has_others = self._kinds_of(model)
        is_purged = self._is_purged(asking.org, specs)
        if is_purged:
            asking.affinity = asking.id.encode()
        elif tokens is None:
            asking.affinity = affinity_of_text(asking)
        if tokens is None:
            return
        self.counts.time(metrics.TOKENIZE, self._clock() - started)
        self.counts.add(metrics.TOKENIZED, "reused", amount=tokens.reused)
        self.counts.add(metrics.TOKENIZED, "computed", amount=len(tokens) - tokens.reused)
        answer = request.answer_tokens_max or 0
        if found.longest + answer > model.tokens_max:
            param = "messages" if isinstance(request, Chat) else "prompt"
            raise too_long(found.longest, answer, model.tokens_max, param)
        if is_purged:
            return
        asking.prompts = {
            spec: tokens.prompt(self._keys_of(asking.org, spec), asking.id) for spec in specs
        }
        if has_others:
            asking.guess = tokens.prompt(self._guess_keys_of(asking.org, model))
        asking.affinity = affinity(asking) or affinity_of_text(asking)

    def _kinds_of(self, model: ServedModel) -> _Kinds:
        found = self._kinds.get(model.name)
        if found is None or found.of is not model:  # it came before the last document
            drivers = [one.driver for one in model.replicas]
            specs = tuple(dict.fromkeys(one.model for one in drivers if one is not None))
            found = self._kinds[model.name] = _Kinds(model, specs, None in drivers)
        return found

    def _is_purged(self, org: OrgSpec, specs: Iterable[ModelSpec]) -> bool:
        """Whether a request was let in by a document from before a purge: it is served without keys."""
        maps = self.maps
        return maps.has_forgotten and (
            maps.is_forgotten(isolation_tag(org.name, org.secret))
            or any(
                maps.is_forgotten(isolation_tag(org.name, org.secret_of(one.name)), one.namespace())
                for one in specs
            )
        )

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

    def _ask_to_borrow(self, driver: DriverSpec, prompt: Prompt, of: Estimate) -> None:
        """The request is about to be sent, with a claim that says so, if the driver takes claims."""
        if driver.claims_key is None:
            self._borrow(driver, prompt, of)
        elif of.sibling:
            self.counts.add(metrics.BORROWS, Result.ASKED)

    def _borrow(self, driver: DriverSpec, prompt: Prompt, of: Estimate) -> None:
        """Ask the driver for what its estimate counts on."""
        if self.recalls is not None and of.sibling:
            hit_tokens = of.candidate.hit_tokens
            self.recalls.borrow(driver.name, prompt, hit_tokens, of.borrowed_tokens, of.sibling)

    def _ticket(self, asking: Asking) -> Ticket:
        request, model = asking.request, asking.model.name
        started = time.perf_counter()
        roster, usable = self.fleet.roster(model), self.fleet.usable(model)
        expected, cached, fastest, chain = None, 0, 0.0, self._chain(asking)
        if usable.size:
            found = self._find(asking, roster)
            choice = self._chosen(asking, roster, usable, found)
            expected, cached = choice.chosen, found.cached(usable)
            if chain:  # else nobody waits for another request that computes the same
                fastest = float(self.rates[model].columns(roster.names).token[usable].min())
            seconds = time.perf_counter() - started
            asking.preview = Preview(choice, roster, usable, self._decisions, self._clock(), seconds)
        answer = request.answer_tokens_max
        if answer is None:
            answer = max(1, asking.model.tokens_max - asking.prompt_tokens)
        return Ticket(
            org=asking.org.name,
            limits=asking.org.limits,
            model=asking.model.name,
            prompt_tokens=asking.prompt_tokens,
            is_estimate=asking.tokens is None,
            answer_tokens_max=answer * request.answers,
            uncached_tokens=max(1, asking.prompt_tokens - cached),
            priority=request.wish,
            deadline=asking.deadline_seconds,
            first_token_seconds=expected.fetch_seconds + expected.compute_seconds if expected else 0.0,
            chain=chain,
            chain_tokens=COLUMN_TOKENS,
            compute_rate=1.0 / max(fastest, TOKEN_SECONDS_MIN) if expected and chain else 0.0,
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
        roster, usable = self.fleet.roster(model), self.fleet.usable(model).tolist()
        rates = self.rates.get(model)
        if rates is None:  # it is served no more, and its last requests leave
            return Room(0, 0)
        tokens = sum(
            max(PREFILL_TOKENS_MIN, int(PREFILL_SECONDS * rates.pace(roster.names[one])))
            for one in usable
        )
        return Room(REQUESTS_AT_ONCE * len(usable), tokens, len(usable))

    # The decision

    def choose(self, asking: Asking, without: Collection[str] = ()) -> Routed:
        """Where it goes now. Raises NoReplica."""
        started = time.perf_counter()
        model, preview, asking.preview = asking.model.name, asking.preview, None
        if preview and not without and self._holds(preview) and not asking.followed:
            choice, roster, usable = preview.choice, preview.roster, preview.usable
            started -= preview.seconds
        else:
            roster, usable = self.fleet.roster(model), self.fleet.usable(model, without)
            if not usable.size:
                raise NoReplica(self._why_none(model, without))
            choice = self._chosen(asking, roster, usable, self._find(asking, roster))
        self._decisions += 1
        replica = roster.replicas[roster.numbers[choice.replica]]
        seconds = time.perf_counter() - started
        self.counts.time(metrics.DECISION, seconds)
        return Routed(replica, choice, seconds, self._excluded(roster, usable, without))

    def _holds(self, preview: Preview) -> bool:
        """Whether nothing has been decided since, and hardly any time has passed."""
        return preview.decision == self._decisions and self._clock() - preview.at < PREVIEW_SECONDS

    def note_sent(self, asking: Asking, routed: Routed) -> None:
        """The request is about to be sent there: what will be cached of it is remembered, until the map
        of its driver has it; without a driver, what may be. What it counts on a sibling for, its driver
        is asked to borrow, by the request itself where its claim can say so."""
        replica = routed.replica
        if (driver := replica.spec.driver) is not None:
            if (prompt := asking.prompts.get(driver.model)) is not None:
                self._ask_to_borrow(driver, prompt, routed.choice.chosen)
                until = self._clock() + routed.choice.chosen.seconds + MAP_SECONDS
                self._sent.add(_place(replica.model, replica.name), prompt.keys, until)
            return
        if asking.guess is None:
            return
        found = self._guessed.get(replica)
        if found is None:
            found = self._guessed[replica] = GuessedMap()
        found.sent(asking.guess)

    def forget(self, tags: Collection[bytes], org: str | None = None) -> None:
        """Nothing is known of columns with these tags, which are of this org. Requests that wait or run
        go on without keys."""
        self._keys.clear()
        self._sent.clear()
        tag_of.cache_clear()
        for one in self._guessed.values():
            for tag in tags:
                one.forget(tag)
        for asking in self._prepared:
            asking.forget(tags)
        self.admission.forget(org)
        if self.recalls:
            self.recalls.forget(tags)

    def _chosen(self, asking: Asking, roster: Roster, usable: Numbers, found: Found) -> Choice:
        asked = Asked(
            asking.prompt_tokens,
            asking.affinity,
            asking.org.name,
            asking.request.answer_tokens_max or 0,
            asking.id,
            asking.request.is_plain,
        )
        rates, now = self.rates[asking.model.name], self._clock()
        rates.settle(now)
        columns = rates.columns(roster.names)
        if columns.unknown and (unknown := columns.unknown.intersection(usable.tolist())):
            for number in unknown:
                rates.of(roster.names[number])
            columns = rates.columns(roster.names)
        candidates = Many(
            usable,
            *(found.hit_tokens, found.tier2_tokens, found.sibling_tokens, found.is_guess),
            lambda: self._queues(asking.model.name, roster, now),
            columns,
            lambda number: self._candidate(asking.model.name, roster, number, found, now),
        )
        return choose(asked, candidates, now, self._rng, rates.mode)

    def _candidate(self, model: str, roster: Roster, number: int, found: Found, now: float) -> Candidate:
        name, driver = roster.names[number], roster.replicas[number].spec.driver
        mirror = self.maps.mirror(driver.name) if driver else None
        return Candidate(
            name,
            self.rates[model].of(name),
            int(found.hit_tokens[number]),
            int(found.tier2_tokens[number]),
            Path(mirror.path) if mirror and mirror.path else Path.LOCAL,
            self._load(model, roster, number, now),
            bool(found.is_guess[number]),
            int(found.sibling_tokens[number]),
            found.sibling(number),
        )

    def _load(self, model: str, roster: Roster, number: int, now: float) -> Load:
        """What all brains have sent to a replica; and others, if it has no driver."""
        name = roster.names[number]
        load = self.flights[model].load(name, now)
        if (other := self.admission.elsewhere.get((model, name))) is not None:
            load = load.plus(other)
        if roster.replicas[number].spec.driver is None:
            strange = self.others((model, name))
            if strange is not IDLE:
                load = load.plus(strange)
        return load

    def _queues(self, model: str, roster: Roster, now: float) -> Queues:
        """What all brains have sent to each replica, and others to those without drivers, by number."""
        own = self.flights[model].queues(roster.names, now)
        standing = self._standing(model, roster)
        queues = own.plus(standing.elsewhere(self.admission.elsewhere))
        for number in standing.without_driver:
            load = self._load(model, roster, number, now)
            for kind, value in zip(queues, Queues.of([load]), strict=True):
                kind[number] = value[0]
        return queues

    def _standing(self, model: str, roster: Roster) -> Standing:
        found = self._standings.get(model)
        if found is None or found.roster is not roster:
            found = self._standings[model] = Standing(model, roster, self._siblings)
        return found

    def _find(self, asking: Asking, roster: Roster) -> Found:
        """What each replica has of the prompt, and what could be lent to it: by cache maps, by what was
        sent there, and by what is guessed."""
        model, now, prompt_tokens = asking.model.name, self._clock(), asking.prompt_tokens
        standing = self._standing(model, roster)
        if not asking.prompts and asking.guess is None and asking.followed is None:
            return standing.unknown
        hits, lent = self._hits(asking, standing)
        count = len(roster)
        is_guess = hits.tokens[:count] < 0
        tokens = np.maximum(hits.tokens[:count], 0)
        for replica, guessed in self._guessed.items():
            number = roster.numbers.get(replica.name)
            if replica.model == model and number is not None and is_guess[number] and asking.guess:
                tokens[number] = guessed.hit(asking.guess).tokens
        found = tokens.copy()
        for name, sent in self._sent_tokens(asking, now):
            if (number := roster.numbers.get(name)) is not None:
                found[number] = max(found[number], sent)
        both = np.minimum(np.maximum(found, tokens + hits.tier2_tokens[:count]), prompt_tokens)
        in_memory = np.minimum(found, both)
        more = np.zeros(count, np.int64)
        if lent:
            more = np.minimum(lent.tokens, prompt_tokens) - in_memory
            more[(more < TOKENS_MIN) | ~standing.may_borrow(self.maps)] = 0
        return Found(in_memory, both - in_memory, more, is_guess, lent)

    def _sent_tokens(self, asking: Asking, now: float) -> Iterator[tuple[str, int]]:
        """What replicas are computing of it, or have computed and not reported."""
        if asking.followed:
            yield asking.followed.replica, asking.followed.tokens
        model = _place(asking.model.name, "")
        for prompt in asking.prompts.values():  # a replica has one driver, so one of them
            for place, tokens in self._sent.hits(prompt.keys, now).items():
                if place.startswith(model):
                    yield place.removeprefix(model), tokens

    def _hits(self, asking: Asking, standing: Standing) -> tuple[Hits, Lent | None]:
        """As cache maps say: of each replica, and then of others that may lend to them."""
        if not asking.prompts:
            return standing.no_hits, None
        started, now = time.perf_counter(), self._wall()
        # Who can't be asked to borrow counts on nobody.
        asked, lent = standing.asked if self.recalls else None, None
        hits = self.maps.hits(asked.names if asked else standing.drivers, asking.prompts, now)
        if asked:
            lent = self._siblings.lent(asked, hits, now, lambda name: self.maps.age(name, self._clock()))
        self.counts.time(metrics.LOOKUP, time.perf_counter() - started)
        return hits, lent

    def _excluded(self, roster: Roster, usable: Numbers, without: Collection[str]) -> dict[str, str]:
        if usable.size == len(roster):
            return {}
        now = self._clock()
        left_out = np.setdiff1d(np.arange(len(roster)), usable).tolist()
        return {
            one.name: "failed" if one.name in without else one.state(now)
            for one in map(roster.replicas.__getitem__, left_out)
        }

    def _why_none(self, model: str, without: Collection[str]) -> str:
        states = self._excluded(self.fleet.roster(model), np.zeros(0, np.int64), without)
        if not states:
            return "The model has no replica."
        counted = {state: sum(1 for one in states.values() if one == state) for state in states.values()}
        told = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in counted.items())
        return f"No replica of this model can take the request now: {told}."

    def _chain(self, asking: Asking) -> Sequence[bytes]:
        prompt = next(iter(asking.prompts.values()), None)
        return prompt.keys if prompt else ()


_NO_ROOM: Final = Room(0, 0)


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
