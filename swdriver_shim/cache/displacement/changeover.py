"""The change from one displacement policy to another, while columns come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final

from swdriver_shim.cache.displacement.base import C, DisplacementPolicy
from swdriver_shim.cache.displacement.parted import Parted

MOVED: Final = 8  # columns that are moved with each one that is stored,
MOVERS: Final = 64  # for so many of those that are stored at once,
PIECES: Final = 16  # while no more pieces of columns are begun for it


class Changeover(DisplacementPolicy[C]):
    """Moves all columns of one policy to another, a few at a time.

    Each column is in one of the two. Those that are stored come to the new policy; those of the old one
    are displaced first, in its order. Columns are moved with each one that is stored, and by `move`.

    When the old policy has no column, and what was noted of those that were moved is freed, `done` is
    called with the new one, once, to use that in the place of this. Until then, as long as only this is
    in use, there is no other change: two policies have columns, not more.
    """

    name = "changeover"
    __slots__ = ("_done", "_left", "_moved", "_old", "_piece", "_unmoved", "to")

    def __init__(
        self,
        old: DisplacementPolicy[C],
        to: DisplacementPolicy[C],
        columns: Callable[[int], Iterator[Iterator[C]]],
        done: Callable[[DisplacementPolicy[C]], object],
    ) -> None:
        """`old` has columns, `to` has none. `columns` gives those of both."""
        super().__init__()
        self.columns = columns
        self.to = to
        self._old: DisplacementPolicy[C] | None = old
        self._done: Callable[[DisplacementPolicy[C]], object] | None = done
        self._moved = Parted[C]()  # those of the new policy, while the old one has columns:
        self._unmoved: Iterator[Iterator[C]] = columns(0)  # they are moved in this order,
        self._piece: Iterator[C] = iter(())  # these first
        self._left: list[set[C]] = []  # afterwards; each call frees one, see `Parted`
        for policy in (old, to):
            policy.columns = partial(self._columns_of, policy)

    def __len__(self) -> int:
        old = self._old  # it may be asked without the lock
        return len(self.to) + (len(old) if old else 0)

    def _columns_of(self, policy: DisplacementPolicy[C], bits: int) -> Iterator[Iterator[C]]:
        for piece in self.columns(bits):
            yield (column for column in piece if self._policy_of(column) is policy)

    def _policy_of(self, column: C) -> DisplacementPolicy[C]:
        return self.to if self._old is None or column in self._moved else self._old

    def expect(self, columns: Sequence[C]) -> None:
        """These columns, which may be among those listed already, are about to be stored."""
        if self._old is not None:
            self._moved.update(columns)

    def stored(self, column: C, now: float) -> None:
        self.stored_all([column], now)

    def stored_all(self, columns: Sequence[C], now: float) -> None:
        self.expect(columns)
        self.to.stored_all(columns, now)
        pieces = PIECES
        for _ in columns[:MOVERS]:
            if pieces > 0:
                pieces -= self._move(MOVED, now)
        self._go_on()

    def used(self, path: Sequence[C], now: float) -> None:
        if self._old is None:
            self.to.used(path, now)
            return
        for policy in (self.to, self._old):
            if its := [column for column in path if self._policy_of(column) is policy]:
                policy.used(its, now)

    def leaf(self, column: C) -> None:
        self._policy_of(column).leaf(column)

    def victim(self, now: float) -> C | None:
        column = None if self._old is None else self._old.victim(now)
        return self.to.victim(now) if column is None else column

    def victims(self, now: float, most: int) -> list[C]:
        if self._old is None:
            return self.to.victims(now, most)
        column = self.victim(now)  # of columns before it nobody knows here which policy has them
        return [] if column is None else [column]

    def displaced(self, run: Sequence[C], now: float) -> None:
        if self._old is None:
            self.to.displaced(run, now)
            self._go_on()
        else:
            [column] = run
            self._policy_of(column).displaced(run, now)
            self._moved.discard(column)
            self._go_on()

    def removed(self, column: C) -> None:
        self._policy_of(column).removed(column)
        self._moved.discard(column)
        self._go_on()

    def move(self, most: int, now: float) -> None:
        """Move up to so many columns."""
        self._move(most, now)
        self._go_on()

    def _move(self, most: int, now: float) -> int:
        """Move up to so many columns, of this piece and the next one, so that nobody waits for long.
        Returns how many pieces were begun."""
        if (old := self._old) is None:
            return 0
        most = min(most, len(old))
        some, begun = self._take(most), 0
        if len(some) < most:
            piece, begun = next(self._unmoved, None), 1
            if piece is None:  # once more, for what was left out
                self._unmoved = self.columns(0)
                piece = next(self._unmoved, iter(()))
            self._piece = piece
            some += self._take(most - len(some))
        for column in some:
            old.removed(column)
            column.mark = None
        self.to.stored_all(some, now)
        return begun

    def _take(self, most: int) -> list[C]:
        """The next columns of this piece that have to be moved."""
        some = list(islice((column for column in self._piece if column not in self._moved), most))
        self._moved.update(some)
        return some

    def _go_on(self) -> None:
        """End as soon as the old policy has nothing."""
        if self._old is not None:
            if len(self._old):
                return
            self._left = self._moved.parts
            self._old, self._moved = None, Parted()
            self._unmoved, self._piece = iter(()), iter(())
            self.to.columns = self.columns
        if len(self.to):
            self._left = self._left[1:]
        else:
            self._left = []  # there may be no further call for a long time
        if not self._left and (done := self._done):
            self._done = None
            done(self.to)
