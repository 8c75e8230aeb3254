"""The requests of one model in one brain: those that wait, and those that have a place. Pure: times are
passed in, and nothing is awaited.

A request gets a place when the replicas have room for it, so that they never queue much themselves and
the order stays ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from inference_brain.admission.fair import WEIGHT_ONE, Counters, FairQueue, Item
from inference_brain.admission.share import Asking, Demand, Division, divide
from inference_brain.admission.single_flight import Flights, Followed
from inference_brain.admission.ticket import Reason, Rejected, Room, Ticket, cost

QUEUED_MAX: Final = 20_000  # of one model in one brain
ANSWER_TOKENS: Final = 256.0  # of a model that has not answered yet
LEARNED: Final = 0.05  # of the mean of answers, by each answer
DEVIATIONS: Final = 2.0
PACE_SECONDS: Final = 10.0  # over which the pace of a queue is measured
PACE_SECONDS_MIN: Final = 0.5
BURST: Final = 1.125  # times the places that there are, for orgs that have less than their share
DIVIDED_SECONDS: Final = 0.005  # for which it holds who wants which part
DIVIDED_MORE: Final = 0.00005  # for each org, so that dividing takes no more than a tenth of a processor


class State(Enum):
    QUEUED = auto()
    PLACED = auto()
    LEFT = auto()


class Report(NamedTuple):
    """What one brain has of a model, as others are told."""

    demand: Mapping[str, Asking]
    prefilling: int
    lowest: float | None  # counter of those that wait


@dataclass(eq=False, slots=True)
class Waiting(Item):
    """A request in a pool, from its entry to its end."""

    ticket: Ticket = None  # type: ignore[assignment]
    entered_at: float = 0.0
    expires_at: float = math.inf  # unless it has a place by then
    placed_at: float = math.nan
    state: State = State.QUEUED
    prefilling: int = 0  # tokens, until its first token
    charged: float = 0.0
    parked_until: float | None = None  # at most, while another computes the same prefix
    has_given_up: bool = False  # to wait for it
    followed: Followed | None = None

    @property
    def is_placed(self) -> bool:
        return self.state is State.PLACED

    @property
    def wait_seconds_max(self) -> float:
        return self.expires_at - self.entered_at


class Pool:
    """What one brain has of one model."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.counters = Counters()
        self.queue: FairQueue[Waiting] = FairQueue(self.counters)
        self.placed = 0
        self.prefilling = 0
        self.placed_of: Counter[str] = Counter()
        self._weights: dict[str, int] = {}  # as last asked with
        self._division = Division(room.requests)
        self._divided_at = -math.inf
        self._others: Mapping[str, Report] = {}
        self._name = ""
        self.flights: Flights[Waiting] = Flights()
        self._parked: dict[Waiting, float] = {}
        self._parked_of: Counter[str] = Counter()
        self._answers = Answers()
        self._excess = Excess()
        self._pace = Pace()
        self._paces: dict[str, Pace] = {}  # of orgs that have waited without a pause

    @property
    def has_waiting(self) -> bool:
        """Whether any request has no place yet."""
        return bool(self.queue or self._parked)

    def demand(self) -> dict[str, Asking]:
        """What each org asks for here."""
        queued = self.queue.orgs
        return {
            org: Asking(self.placed_of[org], queued.get(org, 0), self._weight_of(org))
            for org in {*queued, *self.placed_of}
        }

    def report(self) -> Report:
        """For other brains."""
        return Report(self.demand(), self.prefilling, self.queue.lowest)

    def others_are(self, name: str, others: Mapping[str, Report], now: float) -> None:
        """What other brains have of this model, by their names; `name` is that of this one."""
        self._name = name
        self._others = others
        lowest = [one.lowest for one in others.values() if one.lowest is not None]
        self.counters.elsewhere = min(lowest, default=None)
        self._divide(now)

    def enter(self, ticket: Ticket, now: float, *, at_once: bool = False) -> Waiting:
        """Queue a request; `pump` says when it has its place. With `at_once` it has it already, if
        nobody waits and there is room. Raises Rejected."""
        self._refuse_if_hopeless(ticket, now)
        expected = cost(ticket.computed_tokens, self._answers.expected(ticket))
        waiting = Waiting(
            *(ticket.org, ticket.limits.weight, ticket.rank, expected),
            ticket=ticket,
            entered_at=now,
            expires_at=now + ticket.wait_seconds_max(self._excess.likely),
        )
        self._weights[ticket.org] = waiting.weight
        if at_once and not self.queue and not self._parked and self._is_free():
            self._go_ahead(waiting, now)
        else:
            self.queue.put(waiting)
        return waiting

    def pump(self, now: float) -> list[Waiting]:
        """Give places as long as there is room. Returns those that have one now."""
        if not self.queue and not self._parked:
            if self._pace.is_measured:
                self._pace.note(now, 0.0, is_backlogged=False)
            return []
        self._return([one for one, until in self._parked.items() if until <= now], gave_up=True)
        given: list[Waiting] = []
        while self._may_have_room(now) and (head := self.queue.head()):
            if not self._has_room(head):
                break
            self.queue.discard(head)
            if head.expires_at < now:
                head.state = State.LEFT
            elif not self._park(head, now):
                self._place(head, now)
                given.append(head)
        self._note_pace(given, now)
        return given

    def next_pump(self) -> float | None:
        """When `pump` has something to do even if nothing else happens."""
        return min(self._parked.values()) if self._parked else None

    def first_token(self, waiting: Waiting, now: float, *, is_known: bool = True) -> None:
        """Its prompt is computed. `is_known`: at this moment."""
        if is_known:
            self._excess.learn(now - waiting.placed_at - waiting.ticket.first_token_seconds)
        self.prefilling -= waiting.prefilling
        waiting.prefilling = 0
        self._return(self.flights.landed(waiting, now))

    def leave(self, waiting: Waiting, computed_tokens: int, answer_tokens: int) -> None:
        """It has ended, or has not begun: its place is free, and its org is charged what it was. Does
        nothing the second time."""
        state, waiting.state = waiting.state, State.LEFT
        if state is State.QUEUED:
            self.queue.discard(waiting)
            self._unpark(waiting)
            self.flights.give_up(waiting)
        elif state is State.PLACED:
            self.prefilling -= waiting.prefilling
            waiting.prefilling = 0
            self._return(self.flights.failed(waiting))
            self.placed -= 1
            self._count_out(waiting.org)
            served = cost(computed_tokens, answer_tokens)
            self.counters.charge(waiting.org, waiting.weight, served - waiting.charged)
            if answer_tokens:
                self._answers.learn(waiting.org, answer_tokens)

    def expected_answer(self, ticket: Ticket) -> float:
        """Tokens that its answers are likely to have."""
        return self._answers.expected(ticket)

    def expected_wait(self, ticket: Ticket, now: float) -> float | None:
        """Seconds that a request would wait if nobody else came; None if it is not known."""
        if not self.queue and self._is_free():
            return 0.0
        rate = self._pace.rate(now)
        if rate is None:
            return None
        seconds = self.queue.cost_before(ticket.org, ticket.limits.weight, ticket.rank) / rate
        own = self._paces.get(ticket.org)
        if own and (own_rate := own.rate(now)):  # which tells what others will take that come later
            seconds = max(seconds, self.queue.own_cost_before(ticket.org, ticket.rank) / own_rate)
        return seconds

    def _go_ahead(self, waiting: Waiting, now: float) -> None:
        """What `pump` does for a request that is alone in the queue, without the queue: mostly there is
        none."""
        self.counters.lift(waiting.org, waiting.weight, None)
        self.counters.left(waiting.org)
        if self._park(waiting, now):
            return
        self._place(waiting, now)
        if self._pace.is_measured:
            self._pace.note(now, waiting.cost, is_backlogged=False)
        self._paces.pop(waiting.org, None)

    def _refuse_if_hopeless(self, ticket: Ticket, now: float) -> None:
        if not self.queue and not self._parked and self._is_free():
            return  # it need not wait
        waiting = self.queue.count_of(ticket.org) + self._parked_of[ticket.org]
        if waiting >= max(1, ticket.limits.queued) or (
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
        if len(self.queue) + len(self._parked) >= QUEUED_MAX:
            raise Rejected(
                503, Reason.OVERLOADED, "Too many requests wait for this model.", expected or 1.0
            )
        allowed = ticket.wait_seconds_max(self._excess.likely)
        if expected is not None and expected > allowed:
            raise Rejected(
                503,
                Reason.DEADLINE,
                f"It would wait for about {expected:.1f} s, and may for {allowed:.1f} s.",
                max(1.0, expected - allowed),
            )

    def _is_free(self) -> bool:
        return self.placed < self._places and self._may_prefill(self.room.prefill_tokens)

    @property
    def _places(self) -> int:
        """Of this brain."""
        if not self._others:
            return self.room.requests
        return max(self._division.places, self.room.requests - self._division.wanted_elsewhere)

    def _may_prefill(self, tokens: float) -> bool:
        """Whether one more prompt may be begun, if all brains may have so many tokens of prompts."""
        division = self._division
        if self.prefilling < tokens * division.part:
            return True
        return not division.queued_elsewhere and self.prefilling + division.prefilling_elsewhere < tokens

    def _may_have_room(self, now: float) -> bool:
        """Whether anybody who waits could have a place."""
        if not self.queue:
            return False
        holds = DIVIDED_SECONDS + DIVIDED_MORE * (len(self.placed_of) + self.queue.orgs_count)
        if not self._is_free() and now - self._divided_at > holds:
            self._divide(now)
        return self.placed < self._places * BURST and self._may_prefill(self.room.prefill_tokens * BURST)

    def _has_room(self, head: Waiting) -> bool:
        """An org with less than its share goes ahead, on some places more than there are. Others get the
        next ones later for that."""
        if self._is_free():
            return True
        division = self._division
        if division.weights <= head.weight:  # there is no other org
            return False
        placed = self.placed_of[head.org] + division.placed_elsewhere.get(head.org, 0)
        return placed + 1 <= self.room.requests * head.weight / division.weights

    def _divide(self, now: float) -> None:
        self._divided_at = now
        demands: dict[str, Demand] = {name: one.demand for name, one in self._others.items()}
        demands[self._name] = self.demand()
        self._division = divide(self.room.requests, demands, self._name)
        self._division.prefilling_elsewhere = sum(one.prefilling for one in self._others.values())

    def _weight_of(self, org: str) -> int:
        return self._weights.get(org, WEIGHT_ONE)

    def _park(self, waiting: Waiting, now: float) -> bool:
        """Whether it waits for another request that computes the same."""
        if waiting.has_given_up:
            return False
        seconds, flight = self.flights.seconds_to_wait(waiting.ticket, now)
        if flight is None:
            return False
        if waiting.parked_until is None:  # once: not for one leader after the other
            waiting.parked_until = now + seconds
        if waiting.parked_until <= now:
            return False
        self.flights.follow(waiting, flight)
        self._parked[waiting] = waiting.parked_until
        self._parked_of[waiting.org] += 1
        return True

    def _unpark(self, waiting: Waiting) -> None:
        if self._parked.pop(waiting, None) is not None:
            self._parked_of[waiting.org] -= 1
            if not self._parked_of[waiting.org]:
                del self._parked_of[waiting.org]

    def _return(self, followers: Iterable[Waiting], *, gave_up: bool = False) -> None:
        """They are next again, each where it was in its org's queue."""
        for one in followers:
            self._unpark(one)
            if gave_up:
                self.flights.give_up(one)
                self.flights.gave_up += 1
                one.has_given_up = True
            self.queue.put_back(one)

    def _place(self, waiting: Waiting, now: float) -> None:
        waiting.followed = self.flights.followed(waiting.ticket, now)
        self.flights.lead(waiting, waiting.ticket, waiting.followed)
        waiting.state = State.PLACED
        waiting.placed_at = now
        waiting.prefilling = self.room.counted(waiting.ticket.computed_tokens)
        self.placed += 1
        self.placed_of[waiting.org] += 1
        self.prefilling += waiting.prefilling
        waiting.charged = waiting.cost
        self.counters.charge(waiting.org, waiting.weight, waiting.cost)

    def _note_pace(self, given: Sequence[Waiting], now: float) -> None:
        self._pace.note(now, sum(one.cost for one in given), is_backlogged=bool(self.queue))
        amounts: dict[str, float] = {}
        for one in given:
            amounts[one.org] = amounts.get(one.org, 0.0) + one.cost
        for org, amount in amounts.items():
            if self.queue.count_of(org):
                self._paces.setdefault(org, Pace()).note(now, amount, is_backlogged=True)
            else:
                self._paces.pop(org, None)

    def _count_out(self, org: str) -> None:
        self.placed_of[org] -= 1
        if not self.placed_of[org]:
            del self.placed_of[org]
            if not self.queue.count_of(org):
                self._weights.pop(org, None)


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


class Excess:
    """How much longer first tokens take than their tickets say: a mean and a deviation that forget."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._deviation = 0.0

    @property
    def likely(self) -> float:
        """Few take more."""
        return max(0.0, self._mean + DEVIATIONS * self._deviation)

    def learn(self, seconds: float) -> None:
        error = seconds - self._mean
        self._mean += LEARNED * error
        self._deviation += LEARNED * (abs(error) - self._deviation)


class Pace:
    """How much leaves a queue in a second, measured while requests wait."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether somebody waited the last time."""
        return self._since is not None

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
