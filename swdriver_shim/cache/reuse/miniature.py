"""A small cache that treats the columns of a sample as a driver treats all (miniature simulation).

The driver's own displacement policies decide, leaf-first, in a room that is smaller by as much as the
sample is. So the result holds for any policy, not only for LRU.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from swdriver_shim import loops
from swdriver_shim.cache.displacement import POLICIES, Competition, DisplacementPolicy
from swdriver_shim.cache.displacement.cost import Cost
from swdriver_shim.cache.reuse.sample import Event, Kind, Reference
from swdriver_shim.cache.turns import Turns
from swdriver_shim.policy import Policy

FOLDS: Final = 16
SHARE: Final = 2  # policies learn from one in so many of the sample's columns
_SAMPLED: Final[dict[str, Callable[[], DisplacementPolicy[Any]]]] = {
    Cost.name: lambda: Cost(share=SHARE),
    Competition.name: lambda: Competition(SHARE, SHARE),
}


class Moment:
    """When columns were stored. Prompts that share columns share it: storing them again is for all."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at


class Run(NamedTuple):
    """Columns that were stored together, up to this depth. Most are not in the sample, and a prompt is
    hit up to the first that has expired by its first use."""

    end: int
    stored: Moment


class Column:
    """A column, as displacement policies see it. Empty ones stay while there are columns behind them."""

    __slots__ = ("behind", "bytes", "key", "mark", "needs", "parent", "present", "ref_count", "runs",
                 "stored_at", "tail", "terms", "turn", "used_at", "uses")  # fmt: skip

    def __init__(self, reference: Reference, parent: Column | None) -> None:
        self.key, self.needs, self.tail = reference
        self.parent = parent
        self.bytes = 1
        self.ref_count = 0
        self.mark: object = None
        self.present = False
        self.stored_at = self.used_at = 0.0
        self.uses = 0
        self.turn = self.terms = 0
        self.runs: list[Run] = []  # from the column of the sample before it, to its own end
        self.behind: list[
            Run
        ] = []  # how far prompts continued that have no further column of the sample


@dataclass(slots=True)
class Outcome:
    """Columns of the sample, counted from `count_from` on."""

    asked: int = 0
    missed: list[int] = field(default_factory=lambda: [0] * FOLDS)  # by a part of the keys
    held_max: int = 0
    stored_at: Sequence[float] = ()  # of the columns present in the end
    used_at: Sequence[float] = ()
    depths: Sequence[int] = ()


class Miniature:
    """A cache with a policy, and room for so many columns, or for all."""

    def __init__(self, policy: Policy, room: float | None) -> None:
        name = policy.displacement
        self._queue: DisplacementPolicy[Column] | None = (
            None  # with room for all there is no displacement
        )
        if room is not None:
            self._queue = _SAMPLED[name]() if name in _SAMPLED else POLICIES[name]()
            self._queue.columns = self._present
        self._room = room
        self._first = policy.ttl_first_use_seconds
        self._last = policy.ttl_last_use_seconds
        self._most = policy.columns_max
        self._columns: dict[bytes, Column] = {}
        self._used: deque[tuple[float, Column]] = deque()  # in order; checked when they may have expired
        self._stored: deque[tuple[float, Column]] = deque()
        self._held = 0
        self._turns = Turns()

    def run(self, events: Sequence[Event], count_from: float) -> Outcome:
        outcome = Outcome()
        missed = outcome.missed
        matched: Sequence[Reference] = ()
        found = 0
        for event in events:
            now = event.at
            self._expire(now)
            if event.kind is Kind.MATCH:
                matched, found = event.path, event.found
                self._turns.asked([one.key for one in matched])
                hit = self._match(matched, now)
                if now >= count_from:
                    outcome.asked += len(matched)
                    for one in matched[hit:]:
                        missed[one.key[-1] % FOLDS] += 1
            else:
                if event.kind is Kind.MORE:
                    path = [*matched, *event.path]
                else:
                    found, path = 0, list(event.path)
                length = event.length
                if self._most is not None:
                    path = [one for one in path if one.depth < self._most]
                    found, length = min(found, self._most), min(length, self._most)
                tip = self._store(path, found, now)
                if tip and self._first is not None:
                    self._went_on(tip, found, length, now)
                outcome.held_max = max(outcome.held_max, self._held)
        here = [column for column in self._columns.values() if column.present]
        outcome.stored_at = array("d", [column.stored_at for column in here])
        outcome.used_at = array("d", [column.used_at for column in here])
        outcome.depths = array("I", [column.needs for column in here])
        return outcome

    def _present(self, bits: int) -> Iterator[Iterator[Column]]:
        some = loops.current.sampled(list(self._columns.values()), bits)
        yield (column for column in some if column.present)

    def _match(self, path: Sequence[Reference], now: float) -> int:
        """How many columns are hit. Expired ones have been removed."""
        found, first = [], self._first
        for key, _, _ in path:
            column = self._columns.get(key)
            if column is None or not column.present:
                break
            if first is not None and any(run.stored.at <= now - first for run in column.runs):
                break
            found.append(column)
        if not found:
            return 0
        if self._queue is not None:
            self._queue.used(found, now)
        for column in found:
            column.used_at = now
            column.uses += 1
        if self._last is not None:
            self._used.extend([(now, column) for column in found])
        if self._queue is not None and not found[-1].ref_count:
            self._queue.leaf(found[-1])
        return len(found)

    def _store(self, path: Sequence[Reference], found: int, now: float) -> Column | None:
        """Store missing columns as far as there is room; returns the last column, if there is room for
        all. `found`: how many columns of the prompt had really been stored before."""
        tip: Column | None = None
        columns, turn = self._columns, self._turns.of([one.key for one in path])
        for reference in path:
            column = columns.get(reference.key)
            if column is None:
                column = columns[reference.key] = Column(reference, tip)
                if tip:
                    tip.ref_count += 1  # not to be displaced for those behind it
            if not column.present:
                column.ref_count += 1  # nor to be displaced itself
                has_room = self._make_room(now)
                if has_room:
                    self._put(column, turn, now)
                column.ref_count -= 1
                if not has_room:
                    self._prune(column)
                    return None
            if self._first is not None:
                self._date(column, tip, found, now)
            tip = column
        if tip and not tip.ref_count and self._queue is not None:
            self._queue.leaf(tip)
        return tip

    def _date(self, column: Column, before: Column | None, found: int, now: float) -> None:
        """Date the column, and the columns between it and the one before it in the sample."""
        own = Run(column.needs + 1, Moment(column.stored_at))
        if column.runs:
            self._renew(column.runs[:-1], now)
            column.runs[-1] = own
            return
        lead = _up_to(before.behind if before else (), min(found, column.needs))
        self._renew(lead, now)
        column.runs = [*lead, own]

    def _went_on(self, tip: Column, found: int, length: int, now: float) -> None:
        """The prompt has further columns up to this length, none of them in the sample."""
        self._renew(tip.behind, now)
        if found < length:
            tip.behind = [*_up_to(tip.behind, found), Run(length, Moment(now))]

    def _renew(self, runs: Sequence[Run], now: float) -> None:
        """Expired columns are stored again."""
        over = now - (self._first or 0)
        for run in runs:
            if run.stored.at <= over:
                run.stored.at = now

    def _put(self, column: Column, turn: int, now: float) -> None:
        column.present, column.turn, column.terms = True, turn, turn
        column.stored_at = column.used_at = now
        column.uses = 0
        self._held += 1
        if self._last is not None:
            self._used.append((now, column))
        if self._first is not None:
            self._stored.append((now, column))
        if self._queue is not None:
            self._queue.stored(column, now)

    def _make_room(self, now: float) -> bool:
        if self._room is None or self._queue is None:
            return True
        while self._held + 1 > self._room:
            victim = self._queue.victim(now)
            if victim is None:
                return False
            self._remove(victim, displaced_at=now)
        return True

    def _expire(self, now: float) -> None:
        if self._last is not None:
            over, used = now - self._last, self._used
            while used and used[0][0] <= over:
                at, column = used.popleft()
                if column.present and column.used_at == at:
                    self._remove(column)
        if self._first is not None:
            over, stored = now - self._first, self._stored
            while stored and stored[0][0] <= over:
                at, column = stored.popleft()
                if column.present and column.stored_at == at:
                    self._remove(column)

    def _remove(self, column: Column, displaced_at: float | None = None) -> None:
        column.present = False
        self._held -= 1
        if self._queue is not None:
            if displaced_at is None:
                self._queue.removed(column)
            else:
                self._queue.displaced([column], displaced_at)
        column.mark = None
        self._prune(column)

    def _prune(self, column: Column) -> None:
        while not column.present and not column.ref_count:
            del self._columns[column.key]
            parent = column.parent
            if parent is None:
                return
            parent.ref_count -= 1
            column = parent
        if not column.ref_count and self._queue is not None:
            self._queue.leaf(column)


def _up_to(runs: Sequence[Run], depth: int) -> list[Run]:
    """The runs before this depth."""
    cut = []
    for run in runs:
        cut.append(run if run.end <= depth else Run(depth, run.stored))
        if run.end >= depth:
            break
    return cut
