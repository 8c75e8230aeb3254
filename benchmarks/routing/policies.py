"""Who places requests, as far as it runs in this process: ours, exact knowledge, and two simple ones."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from benchmarks.routing.fleet import Fleet, Result, Router
from benchmarks.routing.timing import Engine, Timing, Work
from benchmarks.routing.traffic import Asking
from inference_brain.choice import (
    Asked,
    Candidate,
    Choice,
    Flights,
    ModelRates,
    Outcome,
    Path,
    SentPrefixes,
    choose,
)
from inference_brain.recalls import TOKENS_MIN
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.keys import COLUMN_TOKENS

MAP_LAG_SECONDS: Final = 1.0
MAP_COLUMNS: Final = 8  # a map names every eighth column


class RoundRobin(Router):
    def __init__(self) -> None:
        self._next = 0
        self._replicas = 0

    async def begin(self, fleet: Fleet) -> None:
        self._replicas = len(fleet.replicas)

    async def place(self, asking: Asking, now: float) -> int:  # noqa: ARG002
        self._next += 1
        return self._next % self._replicas


class LeastLoaded(Router):
    """Fewest requests in flight; of those by chance."""

    def __init__(self) -> None:
        self._flying: list[int] = []
        self._places: dict[int, int] = {}
        self._rng = random.Random(0)

    async def begin(self, fleet: Fleet) -> None:
        self._flying = [0] * len(fleet.replicas)

    async def place(self, asking: Asking, now: float) -> int:  # noqa: ARG002
        least = min(self._flying)
        place = self._rng.choice([at for at, count in enumerate(self._flying) if count == least])
        self._flying[place] += 1
        self._places[asking.number] = place
        return place

    async def end(self, asking: Asking, now: float) -> None:  # noqa: ARG002
        self._flying[self._places.pop(asking.number)] -= 1


class Exact(Router):
    """Knows the caches and queues of all replicas as they are, and the constants of their timing; takes
    the replica with the soonest first token."""

    def __init__(self) -> None:
        self._fleet: Fleet | None = None

    async def begin(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def place(self, asking: Asking, now: float) -> int:
        assert self._fleet
        timing = self._fleet.timing
        best, least = 0, float("inf")
        for replica in self._fleet.replicas:
            running = replica.engine.running
            seconds = 0.0
            for work in replica.work.values():
                seconds += left_seconds(timing, work, replica.hit(_asking(work), now), running)
            hit = replica.hit(asking, now)
            own = Work(asking.tokens, 1, now)
            seconds += left_seconds(timing, own, hit, running)
            if seconds < least:
                best, least = replica.number, seconds
        return best


def _asking(work: Work) -> Asking:
    assert isinstance(work.tag, Asking)
    return work.tag


def left_seconds(timing: Timing, work: Work, hit: int, running: int) -> float:
    """What it takes until a prompt is computed, beside so many running requests."""
    done = work.done if work.begun else min(hit, work.tokens - 1)
    tokens = work.tokens - done
    steps = tokens / timing.step_tokens
    return (
        timing.token * tokens
        + timing.pair * tokens * (done + (tokens + 1) / 2)
        + steps * (timing.step + timing.running * running)
    )


def floor(timing: Timing, requests: Sequence[Asking]) -> Result:
    """What no router can better: each request on an engine that has nothing else to do, and has all that
    any request before it has computed anywhere."""
    result = Result()
    known: set[bytes] = set()
    for asking in requests:
        new = (at for at, key in enumerate(asking.columns) if key not in known)
        hit = COLUMN_TOKENS * next(new, len(asking.columns))
        known.update(asking.columns)
        work = Work(asking.tokens, 1, 0.0)
        engine = Engine(timing, lambda *_, hit=hit: hit, _nothing, _nothing)
        engine.arrive(work, 0.0)
        while not work.first:
            engine.advance()
        result.seconds.append(work.first + timing.request)
        result.cached += work.cached
        result.asked += asking.tokens
        asking.forget()
    return result


def _nothing(work: Work, now: float) -> None:
    """Nobody has to know."""


class LaggedMaps:
    """What a brain knows of caches: every eighth column, after a second."""

    def __init__(self, replicas: int) -> None:
        self._known: list[set[bytes]] = [set() for _ in range(replicas)]
        self._coming: list[tuple[float, int, int, bytes, bool]] = []
        self._order = 0

    def arrived(self, replica: int, column: Column, now: float) -> None:
        self._add(replica, column, now, is_there=True)

    def removed(self, replica: int, column: Column, now: float) -> None:
        self._add(replica, column, now, is_there=False)

    def _add(self, replica: int, column: Column, now: float, *, is_there: bool) -> None:
        if column.depth % MAP_COLUMNS == MAP_COLUMNS - 1:
            self._order += 1
            heapq.heappush(
                self._coming, (now + MAP_LAG_SECONDS, self._order, replica, column.key, is_there)
            )

    def hits(self, keys: Sequence[bytes], now: float) -> list[int]:
        """Tokens, by replica."""
        while self._coming and self._coming[0][0] <= now:
            _, _, replica, key, is_there = heapq.heappop(self._coming)
            (self._known[replica].add if is_there else self._known[replica].discard)(key)
        ends = keys[MAP_COLUMNS - 1 :: MAP_COLUMNS]
        found = []
        for known in self._known:
            count = 0
            for key in ends:
                if key not in known:
                    break
                count += 1
            found.append(count * MAP_COLUMNS * COLUMN_TOKENS)
        return found


class Ours(Router):
    """The brain's choice, with rates that it learns, what it has sent, and maps that lag."""

    def __init__(self) -> None:
        self.rates = ModelRates()
        self.flights = Flights()
        self.choices: dict[int, Choice] = {}
        self._names: list[str] = []
        self._maps = LaggedMaps(0)
        self._rng = random.Random(0)
        self._sent = SentPrefixes()
        self._numbers: dict[str, int] = {}

    async def begin(self, fleet: Fleet) -> None:
        self._names = [f"replica-{index}" for index in range(len(fleet.replicas))]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._maps = LaggedMaps(len(fleet.replicas))
        for replica in fleet.replicas:
            replica.watch(self._maps)

    async def place(self, asking: Asking, now: float) -> int:
        hits = self._maps.hits(asking.columns, now)
        for name, hit in self._sent.hits(asking.columns, now).items():
            at = self._numbers[name]
            hits[at] = max(hits[at], hit)
        self.rates.settle(now)
        candidates = [
            Candidate(name, self.rates.of(name), hit, 0, Path.LOCAL, self.flights.load(name, now))
            for name, hit in zip(self._names, hits, strict=True)
        ]
        candidates = self._with_siblings(candidates, self._maps.hits(asking.columns, now))
        first = asking.columns[: 2 * MAP_COLUMNS]
        asked = Asked(asking.tokens, asking.keys.tag + (first[-1] if first else b""))
        choice = self._choose(asking, asked, candidates, now)
        self.flights.begin(str(asking.number), choice, now)
        self.choices[asking.number] = choice
        until = now + choice.chosen.seconds + 2 * MAP_LAG_SECONDS
        self._sent.add(choice.replica, asking.columns, until)
        return self._numbers[choice.replica]

    def _choose(
        self,
        asking: Asking,  # noqa: ARG002
        asked: Asked,
        candidates: Sequence[Candidate],
        now: float,
    ) -> Choice:
        return choose(asked, candidates, now, self._rng, self.rates.mode)

    def _with_siblings(
        self,
        candidates: list[Candidate],
        hits: Sequence[int],  # noqa: ARG002
    ) -> list[Candidate]:
        """With what others could lend them, by their maps."""
        return candidates

    async def first_token(self, asking: Asking, cached: int, now: float) -> None:
        self.flights.first_token(str(asking.number), now)
        choice = self.choices.pop(asking.number)
        self._sent.add(choice.replica, asking.columns, now + 2 * MAP_LAG_SECONDS)
        self.rates.observe(choice, Outcome(now - choice.at, cached), now)

    async def end(self, asking: Asking, now: float) -> None:  # noqa: ARG002
        self.flights.end(str(asking.number))


class Sharing(Ours):
    """The same, where replicas borrow from each other's memory."""

    def lender(self, asking: Asking) -> int | None:
        sibling = self.choices[asking.number].chosen.sibling
        return self._numbers[sibling] if sibling else None

    def _with_siblings(self, candidates: list[Candidate], hits: Sequence[int]) -> list[Candidate]:
        best = sorted(range(len(hits)), key=hits.__getitem__, reverse=True)[:2]
        made = []
        for number, one in enumerate(candidates):
            lender = next((other for other in best if other != number), None)
            more = hits[lender] - one.hit_tokens if lender is not None else 0
            if lender is not None and more >= TOKENS_MIN:
                one = replace(one, sibling_tokens=more, sibling=self._names[lender])
            made.append(one)
        return made


class WouldBorrow(Sharing):
    """Chooses as `Ours` does, and notes which requests `Sharing` would have had borrow."""

    def __init__(self) -> None:
        super().__init__()
        self.which: set[int] = set()
        self._other_rng = random.Random(0)

    def _choose(
        self, asking: Asking, asked: Asked, candidates: Sequence[Candidate], now: float
    ) -> Choice:
        if choose(asked, candidates, now, self._other_rng, self.rates.mode).chosen.sibling:
            self.which.add(asking.number)
        alone = [replace(one, sibling_tokens=0, sibling="") for one in candidates]
        return super()._choose(asking, asked, alone, now)
