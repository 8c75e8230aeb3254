"""The state machine of one shard: two queues, a count and leases. No bytes, no clocks, no sockets.

Each method is an event. It changes the state, and returns effects that whoever runs the shard carries
out. `now` is any clock that does not go backwards.

Two queues, and what orders them:

- *Evicts* are numbered 1, 2, 3 … by the driver and are applied in exactly this order. `applied` is the
  number of the last one applied.
- *Refills and deletes* each carry the number `after`. They act as soon as `applied` has reached it, in
  the order of (`after`, arrival), and wait for nothing else: not for evicts that they do not need.

What keeps the queues from hurting one another:

- A slot that is being read is leased. An evict that wants it waits until the lease ends or its deadline
  passes; waiting is back-pressure on the evict queue only.
- A slot that an accepted evict is going to write, or that a delete is emptying, is claimed. A refill of
  it gets a miss for it, at once: it can neither read half-written bytes nor starve the writer.
- A delete empties only what evicts up to its `after` have written. When it comes late it takes nothing
  newer with it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.constants import SLOTS_MAX
from kvss_agent.shard.leases import FOREVER, Leases
from kvss_agent.shard.seal import Miss

BATCH_MAX: Final = 64  # columns in one run of evicts, one refill, one delete
RUNS_MAX: Final = 4  # runs accepted and not yet applied
PARKED_MAX: Final = 512  # refills and deletes of one owner that wait
LATE_LOOK_SECONDS: Final = 0.01  # all that wait are looked at so often at most, for what is too late
LEASE_SECONDS_MAX: Final = 30.0
WAIT_SECONDS_MAX: Final = 60.0  # for what a refill or delete has to come after

T = TypeVar("T")
Owner = int  # who asked; the core only hands it back


@dataclass(frozen=True, slots=True)
class Receive:
    """Take the payloads of this run of evicts, in order, into these slots; then say `received`.

    None for a column that is taken and thrown away: a repetition of what was applied already, or
    meant for a slot above the slot limit of a shard that has shrunk.
    """

    owner: Owner
    first: int
    slots: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """Answer a refill from these slots, then say `done(lease)`. A Miss stands where a slot has none."""

    owner: Owner
    request: int
    slots: tuple[int | Miss, ...]
    lease: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Empty these slots of what evicts up to number `up_to` wrote, then say `done(lease)` and answer.

    What numbers above `last` wrote goes too: those evicts were broken off and never happened.
    """

    owner: Owner
    request: int
    slots: tuple[int, ...]
    up_to: int
    last: int
    scrub: bool
    lease: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Bring columns from elsewhere into these slots, then say `done(lease)` and answer.

    Where an evict after number `up_to` wrote, what it wrote stays. A Miss stands where nothing can be
    brought.
    """

    owner: Owner
    request: int
    slots: tuple[int | Miss, ...]
    up_to: int
    lease: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer a refill, a delete or a fill with this miss: it was turned away."""

    owner: Owner
    request: int
    reason: Miss


@dataclass(frozen=True, slots=True)
class Publish:
    """Make this count of applied evicts known."""

    count: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Give back the memory of the slots from this number on: nobody uses them any more."""

    slots: int


Effect = Receive | Serve | Clear | Fill | Reject | Publish | Truncate


@dataclass(slots=True)
class Counts:
    """What has happened since the shard was made."""

    evicts: int = 0
    repeated: int = 0
    above_slot_limit: int = 0
    refills: int = 0
    deletes: int = 0
    fills: int = 0
    late: int = 0
    refused: int = 0
    abandoned: int = 0


@dataclass(slots=True)
class _Run:
    owner: Owner
    first: int
    slots: tuple[int | None, ...]
    receiving: bool = False

    def targets(self) -> list[int]:
        return [slot for slot in self.slots if slot is not None]


class Verb(Enum):
    """What a request does with its slots once `applied` has reached its `after`."""

    # Read them. `Serve` leases the slots. One above the limit is absent; one that is claimed is torn.
    REFILL = auto()
    # Empty them of what evicts up to `after` wrote, once nobody reads or writes them.
    DELETE = auto()
    # Bring columns from tier 2 or another agent into them. Waits like a delete, and takes nothing newer.
    FILL = auto()


class Request(NamedTuple):
    """A refill, a delete or a fill. It waits at most `wait_seconds` for what it comes after."""

    verb: Verb
    owner: Owner
    number: int
    after: int
    slots: Sequence[int]
    wait_seconds: float
    lease_seconds: float = 0.0  # of a refill
    scrub: bool = False  # of a delete


@dataclass(order=True, slots=True)
class _Parked:
    after: int
    arrival: int
    deadline: float = field(compare=False)
    request: Request = field(compare=False)


class Shard:
    """One shard. `slots` is the slot limit: slots below it are in use. `capacity` have memory."""

    def __init__(self, slots: int, applied: int = 0) -> None:
        if not 0 <= slots <= SLOTS_MAX:
            raise ValueError(f"a shard has up to {SLOTS_MAX} slots, not {slots}")
        self.slots = slots
        self.capacity = slots
        self.applied = applied
        self.accepted = applied
        self.counts = Counts()
        self.leases = Leases()
        self._runs: deque[_Run] = deque()
        self._parked: list[_Parked] = []
        self._parked_of: Counter[Owner] = Counter()
        self._next_late = FOREVER  # or earlier: no parked request is too late before this
        self._arrivals = 0
        self._claimed: dict[int, int] = {}
        self._clearing: dict[int, tuple[int, ...]] = {}

    # Evicts

    def evict(self, owner: Owner, first: int, slots: Sequence[int], now: float) -> list[Effect]:
        """A run of evicts, numbered from `first`, one slot each.

        Joins the evict queue; `Receive` follows once it is its turn and nobody reads those slots.
        Numbers that were accepted before are repetitions: taken and thrown away. A number beyond the
        next one is a breach: something was lost, and the count must not skip it.
        """
        _check_batch(slots)
        if first > self.accepted + 1 or first < 1:
            raise Breach(Cause.ORDER, f"evict {first} does not follow {self.accepted}")
        if len(self._runs) >= RUNS_MAX:
            raise Breach(Cause.LIMIT, f"more than {RUNS_MAX} runs of evicts at once")
        if self._runs and self._runs[0].owner != owner:
            raise Breach(Cause.BUSY, "another driver is evicting to this shard")
        targets: list[int | None] = []
        for sequence, slot in enumerate(slots, first):
            if sequence <= self.accepted:
                self.counts.repeated += 1
                targets.append(None)
            elif slot >= self.slots:
                self.counts.above_slot_limit += 1
                targets.append(None)
            else:
                targets.append(slot)
        run = _Run(owner, first, tuple(targets))
        self.accepted = max(self.accepted, first + len(slots) - 1)
        self._runs.append(run)
        self._claim(run.targets(), 1)
        return self._advance(now)

    def received(self, owner: Owner, now: float) -> list[Effect]:
        """The run at the head of the queue is in its slots, sealed: it is applied."""
        run = self._receiving(owner)
        self._runs.popleft()
        self._claim(run.targets(), -1)
        self.counts.evicts += len(run.slots)
        return self._apply(run.first + len(run.slots) - 1) + self._advance(now)

    def abandon(self, owner: Owner, received: int, now: float) -> list[Effect]:
        """This owner is gone. `received` columns of the run that it was sending are in their slots.

        Its runs leave the queue: those columns count, the others never happened, and the next driver
        goes on from `applied`. Its waiting refills and deletes are dropped, its leases end with the
        `done` of whoever serves them.
        """
        effects: list[Effect] = []
        if self._runs and self._runs[0].owner == owner:
            head = self._runs[0]
            self.counts.abandoned += sum(len(run.slots) for run in self._runs) - received
            for run in self._runs:
                self._claim(run.targets(), -1)
            self._runs.clear()
            if received:
                self.counts.evicts += received
                effects += self._apply(head.first + received - 1)
            self.accepted = self.applied
        if self._parked_of.pop(owner, 0):
            self._parked = [parked for parked in self._parked if parked.request.owner != owner]
        return effects + self._advance(now)

    def observe(self, applied: int, now: float) -> list[Effect]:
        """A driver that writes into the arena itself has applied evicts up to this number.

        Evicts do not pass through the queue then. A count that went back is a breach.
        """
        if applied < self.applied or self._runs:
            raise Breach(Cause.ORDER, f"the count went from {self.applied} to {applied}")
        self.counts.evicts += applied - self.applied
        self.applied = self.accepted = applied
        return self._advance(now)

    # Refills and deletes

    def ask(self, request: Request, now: float) -> list[Effect]:
        """Do what the request wants as soon as its time has come."""
        _check_batch(request.slots)
        if self._parked_of[request.owner] >= PARKED_MAX:
            self.counts.refused += 1
            return [Reject(request.owner, request.number, Miss.REFUSED)]
        self._arrivals += 1
        deadline = now + min(request.wait_seconds, WAIT_SECONDS_MAX)
        self._next_late = min(self._next_late, deadline)
        self._parked_of[request.owner] += 1
        insort(self._parked, _Parked(request.after, self._arrivals, deadline, request))
        return self._advance(now)

    def done(self, lease: int, now: float) -> list[Effect]:
        """What `Serve`, `Clear` or `Fill` asked for is done. Changes nothing once a lease is over."""
        self._claim(self._clearing.pop(lease, ()), -1)
        self.leases.end(lease)
        return self._advance(now)

    def is_claimed(self, slot: int) -> bool:
        """Whether an accepted evict is going to write there, or a delete or a fill is at it."""
        return slot in self._claimed

    # Time and size

    def tick(self, now: float) -> list[Effect]:
        """Time has passed. To be called when `next_deadline` is reached, at the latest by who waits."""
        return self._advance(now)

    @property
    def waiting(self) -> int:
        """Refills and deletes that wait."""
        return len(self._parked)

    def next_deadline(self) -> float:
        """When `tick` may have something to do; infinite if only events can change anything."""
        return min(self._next_late, self.leases.next_deadline())

    def resize(self, slots: int, now: float) -> list[Effect]:
        """Change the slot limit. To grow, the memory has to be there first.

        To shrink: from now on evicts above it are discarded and refills find nothing there.
        `Truncate` follows when nobody reads or writes above it any more.
        """
        if not 0 <= slots <= SLOTS_MAX:
            raise ValueError(f"a shard has up to {SLOTS_MAX} slots, not {slots}")
        self.slots = slots
        self.capacity = max(self.capacity, slots)
        return self._advance(now)

    # Inside

    def _advance(self, now: float) -> list[Effect]:
        """Do whatever can be done now. Every event ends here."""
        self.leases.expire(now)
        effects = self._act_on_parked(now) if self._parked or now >= self._next_late else []
        head = self._runs[0] if self._runs else None
        if head and not head.receiving and not self.leases.any_of(head.targets()):
            head.receiving = True
            self._drop_above_limit(head)
            effects.append(Receive(head.owner, head.first, head.slots))
        if self.slots < self.capacity and not self._used_above_limit():
            self.capacity = self.slots
            effects.append(Truncate(self.slots))
        return effects

    def _act_on_parked(self, now: float) -> list[Effect]:
        """Those whose time has come are at the front; the others are looked at when one is too late."""
        due = bisect_right(self._parked, self.applied, key=lambda parked: parked.after)
        if now >= self._next_late:
            due = len(self._parked)
        effects: list[Effect] = []
        waiting: list[_Parked] = []
        for parked in self._parked[:due]:
            request = parked.request
            if parked.after <= self.applied and (effect := self._act(request, now)):
                effects.append(effect)
            elif parked.deadline <= now:
                self.counts.late += 1
                effects.append(Reject(request.owner, request.number, Miss.LATE))
            else:
                waiting.append(parked)
                continue
            self._parked_of[request.owner] -= 1
        self._parked[:due] = waiting
        if now >= self._next_late:
            first = min((parked.deadline for parked in self._parked), default=FOREVER)
            self._next_late = max(first, now + LATE_LOOK_SECONDS)
        return effects

    def _act(self, request: Request, now: float) -> Effect | None:
        """Serve a refill or begin a delete or fill, whose time has come. None: it waits for a slot."""
        verb, owner, number, after, slots, *_ = request
        if verb is Verb.REFILL:
            answers = tuple(self._readable(slot) for slot in slots)
            readable = [slot for slot in answers if isinstance(slot, int)]
            self.counts.refills += 1
            lease = self.leases.take(readable, now + min(request.lease_seconds, LEASE_SECONDS_MAX))
            return Serve(owner, number, answers, lease)
        below = tuple(sorted({slot for slot in slots if slot < self.capacity}))
        if self.leases.any_of(below) or any(slot in self._claimed for slot in below):
            return None
        lease = self.leases.take(below, FOREVER)
        self._clearing[lease] = below
        self._claim(below, 1)
        if verb is Verb.FILL:
            self.counts.fills += 1
            places = tuple(slot if slot < self.slots else Miss.ABSENT for slot in slots)
            return Fill(owner, number, places, after, lease)
        self.counts.deletes += 1
        return Clear(owner, number, below, after, self.accepted, request.scrub, lease)

    def _readable(self, slot: int) -> int | Miss:
        if slot >= self.slots:
            return Miss.ABSENT
        return Miss.TORN if slot in self._claimed else slot

    def _apply(self, sequence: int) -> list[Effect]:
        if sequence <= self.applied:
            return []
        self.applied = sequence
        return [Publish(sequence)]

    def _receiving(self, owner: Owner) -> _Run:
        if not self._runs or not self._runs[0].receiving or self._runs[0].owner != owner:
            raise RuntimeError("no run of this owner is being received")
        return self._runs[0]

    def _claim(self, slots: Sequence[int], by: int) -> None:
        _count(self._claimed, slots, by)

    def _drop_above_limit(self, run: _Run) -> None:
        """The slot limit may have changed since the run was accepted."""
        above = [slot for slot in run.targets() if slot >= self.slots]
        if above:
            self._claim(above, -1)
            self.counts.above_slot_limit += len(above)
            run.slots = tuple(None if slot in above else slot for slot in run.slots)

    def _used_above_limit(self) -> bool:
        written = self._runs[0].targets() if self._runs and self._runs[0].receiving else []
        return self.leases.any_from(self.slots) or any(slot >= self.slots for slot in written)


def batches(items: Iterable[T], most: int = BATCH_MAX) -> Iterator[list[T]]:
    """In pieces that one request may have, or of at most so many."""
    rest = iter(items)
    while batch := list(islice(rest, most)):
        yield batch


def _count(counter: dict[int, int], slots: Sequence[int], by: int) -> None:
    for slot in slots:
        count = counter.get(slot, 0) + by
        if count:
            counter[slot] = count
        else:
            del counter[slot]


def _check_batch(slots: Sequence[int]) -> None:
    if not 0 < len(slots) <= BATCH_MAX:
        raise Breach(Cause.LIMIT, f"a batch has 1 to {BATCH_MAX} columns, not {len(slots)}")
    if min(slots) < 0:
        raise Breach(Cause.MALFORMED, "slot numbers are not negative")
