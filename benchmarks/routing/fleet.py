"""Emulated replicas: engines with the timing of a real one, each with the ledger of a real driver."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from benchmarks.harness import percentile
from benchmarks.routing.timing import Engine, Timing, Work
from benchmarks.routing.traffic import Asking
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy
from swdriver_shim.replay.emulator import run_housekeeping

LAYOUT: Final = Layout((Group("full", (1,)),))
DAY: Final = 24 * 3600
KEPT: Final = OrgPolicies(policy=Policy(ttl_last_use_seconds=DAY))
HOUSEKEEPING_SECONDS: Final = 1.0


class Router:
    """Who places requests. Told what a router sees: its own requests, their first tokens and ends."""

    async def begin(self, fleet: Fleet) -> None:
        pass

    async def place(self, asking: Asking, now: float) -> int:
        """The number of the replica that gets it."""
        raise NotImplementedError

    def lender(self, asking: Asking) -> int | None:  # noqa: ARG002
        """Of whose memory the replica borrows first what it lacks, once it is placed."""
        return None

    async def first_token(self, asking: Asking, cached: int, now: float) -> None:
        pass

    async def end(self, asking: Asking, now: float) -> None:
        pass

    async def finish(self) -> None:
        pass


class Watcher(Protocol):
    """Follows what a replica stores, as maps and events do."""

    def arrived(self, replica: int, column: Column, now: float) -> None: ...

    def removed(self, replica: int, column: Column, now: float) -> None: ...


@dataclass(slots=True)
class Told:
    """A first or last token, which the policy is told of once the engine's step is over."""

    asking: Asking
    is_first: bool
    cached: int
    at: float


class Replica(Listener):
    """An engine and a ledger with room for so many columns."""

    def __init__(self, number: int, timing: Timing, columns: int, told: list[Told]) -> None:
        self.number = number
        self.ledger = Ledger(LAYOUT, "emulated")
        self.ledger.set_slot_limit(0, columns)
        self.engine = Engine(timing, self._find, self._first, self._last)
        self.work: dict[int, Work] = {}  # without a first token, by request
        self.watcher: Watcher | None = None
        self.now = 0.0
        self._told = told

    def watch(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.ledger.add_listener(self)

    def arrived(self, columns: Sequence[Column]) -> None:
        if self.watcher:
            for column in columns:
                self.watcher.arrived(self.number, column, self.now)

    def removed(self, columns: Sequence[Column]) -> None:
        if self.watcher:
            for column in columns:
                self.watcher.removed(self.number, column, self.now)

    def accept(self, asking: Asking, now: float, ready: float = 0.0) -> None:
        """It has its place in the queue at once, and is computed once what it waits for is ready."""
        self.now = now
        work = Work(asking.tokens, asking.output, now, ready, tag=asking)
        self.work[asking.number] = work
        self.engine.arrive(work, now)

    def borrow(self, asking: Asking, tokens: int, now: float) -> None:
        """So many tokens of it have come from another one's memory."""
        self.now = now
        store = self.ledger.begin_store(asking.prompt, tokens, now)
        self.ledger.finish_store(store, now)

    def hit(self, asking: Asking, now: float) -> int:
        """What it will hit if it comes now, after all that wait here."""
        waiting = (_asking(work) for work in self.work.values())
        shared = max((shared_tokens(asking, one) for one in waiting if one is not asking), default=0)
        return max(shared, self.ledger.query(asking.prompt, now))

    def _find(self, work: Work, now: float) -> int:
        assert isinstance(work.tag, Asking)
        self.now = now
        match = self.ledger.match(work.tag.prompt, now)
        self.ledger.release(match)
        # An engine's own cache has what is computed in this step.
        shared = [
            min(shared_tokens(work.tag, _asking(other)), tokens)
            for other, tokens in self.engine.computed()
        ]
        return max([match.tokens, *shared]) // COLUMN_TOKENS * COLUMN_TOKENS

    def _first(self, work: Work, now: float) -> None:
        assert isinstance(work.tag, Asking)
        self.now = now
        prompt = work.tag.prompt
        whole = prompt.tokens // COLUMN_TOKENS * COLUMN_TOKENS
        store = self.ledger.begin_store(prompt, whole, now)
        self.ledger.finish_store(store, now)
        del self.work[work.tag.number]
        self._told.append(Told(work.tag, True, work.cached, now))

    def _last(self, work: Work, now: float) -> None:
        assert isinstance(work.tag, Asking)
        work.tag.forget()
        self._told.append(Told(work.tag, False, work.cached, now))


def _asking(work: Work) -> Asking:
    assert isinstance(work.tag, Asking)
    return work.tag


def shared_tokens(one: Asking, other: Asking) -> int:
    """Of the columns that both begin with: equal keys have equal columns before them."""
    mine, theirs = one.columns, other.columns
    low, high = 0, min(len(mine), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low * COLUMN_TOKENS


@dataclass(frozen=True)
class Transfers:
    """What it takes to bring columns from another replica's memory."""

    wait: float  # seconds, however many there are
    token: float  # seconds of each


@dataclass(order=True, slots=True)
class Coming:
    """So many tokens of a prompt, which another replica lends; a request waits for them in its queue."""

    at: float
    number: int
    place: int
    asking: Asking = field(compare=False)
    tokens: int = field(compare=False)


@dataclass
class Result:
    """Of one policy on one load."""

    seconds: list[float] = field(default_factory=list)  # to the first token
    by_request: dict[int, float] = field(default_factory=dict)  # the same
    borrowed: dict[int, int] = field(default_factory=dict)  # tokens, of requests that waited for some
    cached: int = 0  # tokens
    asked: int = 0
    prompt_seconds: float = 0.0  # of all replicas
    ended: float = 0.0

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    def at(self, share: float) -> float:
        return percentile(self.seconds, share)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.asked


class Queue:
    """Requests that are still to come, in the order of the trace."""

    def __init__(self, requests: Sequence[Asking]) -> None:
        self._left = deque(requests)
        self._aside: dict[str, deque[Asking]] = {}  # of sessions that wait for an answer
        self._ready: deque[Asking] = deque()
        self._asked: set[str] = set()  # sessions

    def __bool__(self) -> bool:
        return bool(self._left or self._ready or any(self._aside.values()))

    @property
    def next_at(self) -> float:
        return self._left[0].at if self._left else math.inf

    def make_ready(self) -> bool:
        """Whether there is one whose session waits for nothing, which is popped next."""
        while not self._ready and self._left:
            asking = self._left.popleft()
            session = asking.request.session
            if session in self._asked:
                self._aside.setdefault(session, deque()).append(asking)
            else:
                self._asked.add(session)
                self._ready.append(asking)
        return bool(self._ready)

    def pop(self) -> Asking:
        return self._ready.popleft() if self._ready else self._left.popleft()

    def answered(self, asking: Asking) -> None:
        session = asking.request.session
        self._asked.discard(session)
        if aside := self._aside.get(session):
            self._asked.add(session)
            self._ready.append(aside.popleft())


class Fleet:
    """Replicas, and what happens to them, in the order of time."""

    def __init__(
        self,
        timing: Timing,
        replicas: int,
        columns: int,
        orgs: Sequence[str],
        transfers: Transfers = Transfers(0.0, 0.0),
    ) -> None:
        self.timing = timing
        self._transfers = transfers
        self._coming: list[Coming] = []
        self._told: list[Told] = []
        self.replicas = [Replica(index, timing, columns, self._told) for index in range(replicas)]
        self.now = 0.0
        self._housekeeping_at = 0.0
        for replica in self.replicas:
            replica.ledger.set_policies(dict.fromkeys(orgs, KEPT), 0.0)

    async def play(
        self, requests: Sequence[Asking], policy: Router, speed: float, at_once: int | None = None
    ) -> Result:
        """All requests, at so many times the speed of the trace; or, with `at_once`, each as soon as
        fewer than so many are in flight, and those before it in its session are answered."""
        result, flying = Result(), 0
        await policy.begin(self)
        queue = Queue(requests)
        while queue or flying:
            due = min(replica.engine.due for replica in self.replicas)
            if self._coming:
                due = min(due, self._coming[0].at)
            if at_once is None:
                next_at = queue.next_at / speed
            else:
                next_at = self.now if flying < at_once and queue.make_ready() else math.inf
            if next_at <= due:
                asking = queue.pop()
                self.now = max(self.now, next_at)
                self._housekeep()
                place = await policy.place(asking, self.now)
                asking.sent = self.now
                if tokens := self._send(asking, place, policy.lender(asking)):
                    result.borrowed[asking.number] = tokens
                flying += 1
                continue
            self.now = due
            while self._coming and self._coming[0].at <= due:
                one = heapq.heappop(self._coming)
                self.replicas[one.place].borrow(one.asking, one.tokens, due)
            for replica in self.replicas:
                if replica.engine.due <= due:
                    replica.engine.advance()
            for told in self._told:
                if told.is_first:
                    seconds = told.at - told.asking.sent + self.timing.request
                    result.seconds.append(seconds)
                    result.by_request[told.asking.number] = seconds
                    result.cached += told.cached
                    result.asked += told.asking.tokens
                    await policy.first_token(told.asking, told.cached, told.at)
                else:
                    flying -= 1
                    queue.answered(told.asking)
                    await policy.end(told.asking, told.at)
            self._told.clear()
        result.ended = self.now
        result.prompt_seconds = sum(replica.engine.prompt_seconds for replica in self.replicas)
        return result

    def _send(self, asking: Asking, place: int, lender: int | None) -> int:
        """Returns how many tokens are borrowed first."""
        replica, there = self.replicas[place], 0
        if lender is not None:
            there = self.replicas[lender].ledger.query(asking.prompt, self.now)
            there -= there % COLUMN_TOKENS
        more = there - replica.ledger.query(asking.prompt, self.now)
        if more <= 0:
            replica.accept(asking, self.now)
            return 0
        at = self.now + self._transfers.wait + self._transfers.token * more
        heapq.heappush(self._coming, Coming(at, asking.number, place, asking, there))
        replica.accept(asking, self.now, at)
        return more

    def _housekeep(self) -> None:
        if self.now >= self._housekeeping_at:
            self._housekeeping_at = self.now + HOUSEKEEPING_SECONDS
            for replica in self.replicas:
                replica.now = self.now
                run_housekeeping(replica.ledger, self.now)
