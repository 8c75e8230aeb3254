"""Orgs, brains and replicas in a time of their own: the real queues before simulated replicas.

Replicas compute prompts one after the other, and answers beside each other, the slower the more there
are. Brains see each other as through Redis: ten times a second, a moment late. One seed decides all.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from inference_brain.admission.pool import Pool, State, Waiting
from inference_brain.admission.ticket import Rejected, Room, Ticket, cost
from inference_brain.desired import Limits

PREFILL_RATE: Final = 10_000.0  # tokens of prompts that a replica computes in a second
STEP_SECONDS: Final = 0.015  # of one token of an answer, alone on its replica
STEP_MORE: Final = 0.0005  # for each other answer
PLACES: Final = 24  # of a replica
PREFILL_SECONDS: Final = 0.1  # of prompts that a replica may have before it
SYNC_SECONDS: Final = 0.1
MODEL: Final = "m"


@dataclass
class Org:
    """Asks `rate` times a second, of brains by these chances. `answers`: mean of its tokens."""

    name: str
    rate: float
    prompts: float = 1500.0
    answers: float = 120.0
    weight: int = 100
    chances: Sequence[float] = (1.0,)
    wait_seconds: float = 30.0
    good_seconds: float = 30.0  # after which a first token is of no use
    queued: int = 10_000

    @property
    def cost(self) -> float:
        return cost(self.prompts, self.answers)


@dataclass
class Served:
    """What an org got: requests and tokens, and how long each waited for its first token."""

    asked: int = 0
    refused: int = 0
    expired: int = 0
    done: int = 0
    cost: float = 0.0
    good: int = 0  # of those that are done, how many began in time
    waits: list[float] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # in which they got their places


class Replica:
    def __init__(self) -> None:
        self.prefill_free_at = 0.0
        self.running = 0
        self.waiting: deque[tuple[str, Waiting]] = deque()  # where nobody queued before


class Board:
    """What Redis has, without Redis."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = defaultdict(float)

    def sync(self, name: str, pools: dict[str, Pool], now: float) -> None:
        pool = pools[name]
        for org, (more, least) in pool.counters.take_unsent().items():
            self.counters[org] = max(self.counters[org], least) + more
        orgs = pool.demand()
        pool.counters.merge({org: self.counters[org] for org in orgs})
        pool.others_are(name, {one: pools[one].report() for one in pools if one != name}, now)


class World:
    def __init__(
        self,
        orgs: Sequence[Org],
        *,
        brains: int = 2,
        replicas: int = 8,
        seed: int = 1,
        warm: float = 10.0,
        is_fair: bool = True,
    ) -> None:
        """What happens before `warm` seconds is not counted. `is_fair`: else every request is sent on at
        once to the replica with the fewest, which serves them in the order of arrival."""
        self.now = 0.0
        self.orgs = {org.name: org for org in orgs}
        self.served: dict[str, Served] = {org.name: Served() for org in orgs}
        self.replicas = [Replica() for _ in range(replicas)]
        room = Room(PLACES * replicas, int(PREFILL_SECONDS * PREFILL_RATE * replicas), replicas)
        self.pools = {
            f"brain-{number}": Pool(room if is_fair else Room(1 << 30, 1 << 40))
            for number in range(brains)
        }
        self._room = room if is_fair else Room(1 << 30, 1 << 40)
        self._board = Board()
        self.warm = warm
        self._is_fair = is_fair
        self._late: set[Waiting] = set()
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self.idle_seconds = 0.0  # of places while requests waited
        self.overfull = 0  # most places beyond those that there are
        for org in orgs:
            self._after(self._random.expovariate(org.rate), partial(self._arrive, org))
        for number, name in enumerate(self.pools):
            self._after(SYNC_SECONDS * (1 + number / brains), partial(self._sync, name))

    def run(self, until: float) -> World:
        while self._events and self._events[0][0] <= until:
            at, _, event = heapq.heappop(self._events)
            self._account(at - self.now)
            self.now = at
            event()
        return self

    @property
    def capacity(self) -> float:
        """Cost in a second that all replicas do at most, with requests as these."""
        orgs = list(self.orgs.values())
        prompts = sum(org.prompts for org in orgs) / len(orgs)
        answers = sum(org.answers for org in orgs) / len(orgs)
        step = STEP_SECONDS + STEP_MORE * (PLACES - 1)
        seconds = prompts / PREFILL_RATE + answers * step  # that a request has its place
        requests = min(PLACES / seconds, PREFILL_RATE / prompts)
        return requests * cost(prompts, answers) * len(self.replicas)

    # Events

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._sequence), event))

    def _account(self, seconds: float) -> None:
        waiting = sum(len(pool.queue) for pool in self.pools.values())
        placed = sum(pool.placed for pool in self.pools.values())
        prefilling = sum(pool.prefilling for pool in self.pools.values())
        self.overfull = max(self.overfull, placed - self._room.requests)
        if waiting and prefilling < self._room.prefill_tokens:
            self.idle_seconds += seconds * min(waiting, max(0, self._room.requests - placed))

    def _sync(self, name: str) -> None:
        self._board.sync(name, self.pools, self.now)
        self._pump(name)
        self._after(SYNC_SECONDS, partial(self._sync, name))

    def _arrive(self, org: Org) -> None:
        self._after(self._random.expovariate(org.rate), partial(self._arrive, org))
        served = self.served[org.name]
        served.asked += self.now >= self.warm
        names = list(self.pools)
        chances = org.chances if len(org.chances) == len(names) else [1.0] * len(names)
        name = self._random.choices(names, chances)[0] if self._is_fair else names[0]
        prompt = max(1, int(self._random.expovariate(1 / org.prompts)))
        limits = Limits(weight=org.weight, wait_seconds=org.wait_seconds, queued=org.queued)
        ticket = Ticket(
            org=org.name,
            limits=limits,
            model=MODEL,
            prompt_tokens=prompt,
            answer_tokens_max=4096,
            deadline=org.good_seconds,
            first_token_seconds=prompt / PREFILL_RATE,
        )
        try:
            waiting = self._enter(self.pools[name], ticket)
        except Rejected:
            served.refused += self.now >= self.warm
            return
        if self._is_fair:
            self._after(waiting.wait_seconds_max, partial(self._expire, name, waiting))
        self._pump(name)

    def _enter(self, pool: Pool, ticket: Ticket) -> Waiting:
        if self._is_fair:
            return pool.enter(ticket, self.now)
        waiting = Waiting("all", 100, 0, 1.0, ticket=ticket, entered_at=self.now)
        pool.queue.put(waiting)
        return waiting

    def _expire(self, name: str, waiting: Waiting) -> None:
        if waiting.state is State.QUEUED:
            self.pools[name].leave(waiting, 0, 0)
            self.served[waiting.ticket.org].expired += self.now >= self.warm

    def _pump(self, name: str) -> None:
        for waiting in self.pools[name].pump(self.now):
            self.served[waiting.ticket.org].order.append(waiting.sequence)
            replica = min(self.replicas, key=self._busy)
            if replica.running < PLACES or self._is_fair:
                self._begin(name, waiting, replica)
            else:
                replica.waiting.append((name, waiting))

    def _busy(self, replica: Replica) -> tuple[int, float, int]:
        begins = max(replica.prefill_free_at, self.now)
        return len(replica.waiting), begins, replica.running

    def _begin(self, name: str, waiting: Waiting, replica: Replica) -> None:
        begins = max(replica.prefill_free_at, self.now)
        replica.prefill_free_at = begins + waiting.ticket.prompt_tokens / PREFILL_RATE
        replica.running += 1
        wait = replica.prefill_free_at - self.now
        self._after(wait, partial(self._first_token, name, waiting, replica))

    def _first_token(self, name: str, waiting: Waiting, replica: Replica) -> None:
        served = self.served[waiting.ticket.org]
        wait = self.now - waiting.entered_at
        if waiting.entered_at >= self.warm:
            served.waits.append(wait)
        if wait > self.orgs[waiting.ticket.org].good_seconds:
            self._late.add(waiting)
        self.pools[name].first_token(waiting, self.now)
        self._pump(name)
        answer = 1 + int(self._random.expovariate(1 / self.orgs[waiting.ticket.org].answers))
        step = STEP_SECONDS + STEP_MORE * (replica.running - 1)
        self._after(answer * step, partial(self._done, name, waiting, replica, answer))

    def _done(self, name: str, waiting: Waiting, replica: Replica, answer: int) -> None:
        replica.running -= 1
        if replica.waiting:
            self._begin(*replica.waiting.popleft(), replica)
        served = self.served[waiting.ticket.org]
        prompt = waiting.ticket.prompt_tokens
        if self.now >= self.warm:
            served.done += 1
            served.cost += cost(prompt, answer)
            served.good += waiting not in self._late
        self.pools[name].leave(waiting, prompt, answer)
        self._pump(name)


def jain(amounts: Sequence[float]) -> float:
    """1 if all are equal, 1/n if one has all."""
    return sum(amounts) ** 2 / (len(amounts) * sum(one * one for one in amounts))
