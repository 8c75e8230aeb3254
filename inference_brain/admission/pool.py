"""The requests of one model in one brain: those that wait, and those that have a place. Pure: times are
passed in, and nothing is awaited.

A request gets a place when the replicas have room for it, so that they never queue much themselves and
the order stays ours.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from inference_brain.admission.fair import Counters, FairQueue, Item
from inference_brain.admission.ticket import Reason, Rejected, Room, Ticket, cost

QUEUED_MAX: Final = 20_000  # of one model in one brain
ANSWER_TOKENS: Final = 256.0  # of a model that has not answered yet
LEARNED: Final = 0.05  # of the mean of answers, by each answer
PACE_SECONDS: Final = 10.0  # over which the pace of a queue is measured
PACE_SECONDS_MIN: Final = 0.5
BURST_SHARE: Final = 8  # one of so many places more, for orgs that have less than their share


class State(Enum):
    QUEUED = auto()
    PLACED = auto()
    LEFT = auto()


@dataclass(eq=False, slots=True)
class Waiting(Item):
    """A request in a pool, from its entry to its end."""

    ticket: Ticket = None  # type: ignore[assignment]
    entered_at: float = 0.0
    placed_at: float = math.nan
    state: State = State.QUEUED
    prefilling: int = 0  # tokens, until its first token
    charged: float = 0.0

    @property
    def expires_at(self) -> float:
        return self.entered_at + self.ticket.wait_seconds_max


class Pool:
    """What one brain has of one model."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.counters = Counters()
        self.queue: FairQueue[Waiting] = FairQueue(self.counters)
        self.placed = 0
        self.prefilling = 0
        self.placed_of: Counter[str] = Counter()
        self._answers = Answers()
        self._pace = Pace()

    def enter(self, ticket: Ticket, now: float) -> Waiting:
        """Queue a request; `pump` says when it has its place. Raises Rejected."""
        self._refuse_if_hopeless(ticket, now)
        expected = cost(ticket.computed_tokens, self._answers.expected(ticket))
        waiting = Waiting(
            ticket.org, ticket.limits.weight, ticket.rank, expected, ticket=ticket, entered_at=now
        )
        self.queue.put(waiting)
        return waiting

    def pump(self, now: float) -> list[Waiting]:
        """Give places as long as there is room. Returns those that have one now."""
        given: list[Waiting] = []
        while (head := self.queue.head()) and self._is_free():
            self.queue.discard(head)
            if head.expires_at < now:
                head.state = State.LEFT
                continue
            self._place(head, now)
            given.append(head)
        self._pace.note(now, sum(one.cost for one in given), is_backlogged=bool(self.queue))
        return given

    def first_token(self, waiting: Waiting) -> None:
        """Its prompt is computed."""
        self.prefilling -= waiting.prefilling
        waiting.prefilling = 0

    def leave(self, waiting: Waiting, computed_tokens: int, answer_tokens: int) -> None:
        """It has ended, or has not begun: its place is free, and its org is charged what it was. Does
        nothing the second time."""
        state, waiting.state = waiting.state, State.LEFT
        if state is State.QUEUED:
            self.queue.discard(waiting)
        elif state is State.PLACED:
            self.first_token(waiting)
            self.placed -= 1
            self._count_out(waiting.org)
            served = cost(computed_tokens, answer_tokens)
            self.counters.charge(waiting.org, waiting.weight, served - waiting.charged)
            if answer_tokens:
                self._answers.learn(waiting.org, answer_tokens)

    def expected_wait(self, ticket: Ticket, now: float) -> float | None:
        """Seconds that a request would wait if nobody else came; None if it is not known."""
        if not self.queue and self._is_free():
            return 0.0
        rate = self._pace.rate(now)
        if rate is None:
            return None
        return self.queue.cost_before(ticket.org, ticket.limits.weight, ticket.rank) / rate

    def _refuse_if_hopeless(self, ticket: Ticket, now: float) -> None:
        if self.queue.count_of(ticket.org) >= max(1, ticket.limits.queued) or (
            ticket.limits.queued == 0 and not self._is_free()
        ):
            wait = self.expected_wait(ticket, now)
            raise Rejected(
                429,
                Reason.QUEUE,
                f"{ticket.limits.queued} requests of your organization wait already, as many as may.",
                max(1.0, wait / 2) if wait else 1.0,
            )
        expected = self.expected_wait(ticket, now)
        if len(self.queue) >= QUEUED_MAX:
            raise Rejected(
                503, Reason.OVERLOADED, "Too many requests wait for this model.", expected or 1.0
            )
        allowed = ticket.wait_seconds_max
        if expected is not None and expected > allowed:
            raise Rejected(
                503,
                Reason.DEADLINE,
                f"It would wait for about {expected:.1f} s, and may for {allowed:.1f} s.",
                max(1.0, expected - allowed),
            )

    def _is_free(self) -> bool:
        return self.placed < self.room.requests and self.prefilling < self.room.prefill_tokens

    def _place(self, waiting: Waiting, now: float) -> None:
        waiting.state = State.PLACED
        waiting.placed_at = now
        waiting.prefilling = waiting.ticket.computed_tokens
        self.placed += 1
        self.placed_of[waiting.org] += 1
        self.prefilling += waiting.prefilling
        waiting.charged = waiting.cost
        self.counters.charge(waiting.org, waiting.weight, waiting.cost)

    def _count_out(self, org: str) -> None:
        self.placed_of[org] -= 1
        if not self.placed_of[org]:
            del self.placed_of[org]


class Answers:
    """How long answers are, by org: means that forget."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._means: dict[str, float] = {}

    def expected(self, ticket: Ticket) -> float:
        mean = self._means.get(ticket.org, self._mean)
        return min(ANSWER_TOKENS if mean is None else mean, ticket.answer_tokens_max)

    def learn(self, org: str, tokens: int) -> None:
        before = self._means.get(org, self._mean)
        before = tokens if before is None else before
        self._means[org] = before + LEARNED * (tokens - before)
        mean = tokens if self._mean is None else self._mean
        self._mean = mean + LEARNED * (tokens - mean)


class Pace:
    """How much leaves a queue in a second, measured while requests wait."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def note(self, now: float, amount: float, *, is_backlogged: bool) -> None:
        """So much has left; `is_backlogged`: others wait still."""
        if self._since is not None:
            passed = max(0.0, now - self._since)
            kept = math.exp(-passed / PACE_SECONDS)
            self._amount = self._amount * kept + amount
            self._seconds = self._seconds * kept + passed
        self._since = now if is_backlogged else None

    def rate(self, now: float) -> float | None:
        """None: it has not been measured for long enough. While nothing leaves, it falls."""
        since = 0.0 if self._since is None else max(0.0, now - self._since)
        kept = math.exp(-since / PACE_SECONDS)
        seconds = self._seconds * kept + since
        if seconds < PACE_SECONDS_MIN or not self._amount:
            return None
        return self._amount * kept / seconds
