"""The interfaces of displacement policies and of the columns that they order.

The columns of an org's prompts form a forest: a column's parent is the one before it in the prompt, and
has to be kept as long as it. So room is made leaf-first, and a policy decides among leaves only. The
driver pins columns in use; a pin counts as a child does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar


class Displaceable(Protocol):
    """A column as policies see it. They write `mark` and nothing else; equality is identity.

    Compiled loops read it, so `key`, `mark`, `parent`, `ref_count`, `used_at`, `uses` and `terms` are
    slots.
    """

    mark: Any  # the policy's own; None when a column comes to it

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> Displaceable | None: ...
    @property
    def ref_count(self) -> int:
        """Children present, and pins. A candidate while it is 0."""

    @property
    def used_at(self) -> float:
        """When it was stored or last hit."""

    @property
    def stored_at(self) -> float: ...
    @property
    def uses(self) -> int:
        """Hits since it was stored."""

    @property
    def turn(self) -> int:
        """Which prompt of its conversation stored it: 0 for the first."""

    @property
    def terms(self) -> object:
        """Columns that have the same are of the same turn."""

    @property
    def needs(self) -> int:
        """How many columns before it in its prompt have to be stored as well."""

    @property
    def bytes(self) -> int: ...
    @property
    def tail(self) -> bool:
        """Whether it has fewer tokens than a whole column: only exactly the same prompt continues it."""


C = TypeVar("C", bound=Displaceable)


class DisplacementPolicy(ABC, Generic[C]):
    """Decides which leaf is displaced next. One instance for each org, group and priority; no clock, no
    I/O, deterministic. `now` never decreases.

    Calls are fast, whatever the number of columns: leaves are queued by their rank at that time, and
    ranked again when they come to the front.
    """

    name: ClassVar[str]
    __slots__ = ("_count", "columns")
    # Gives the columns that the policy has and whose keys have none of these bits in their first two
    # bytes, in any order, for what is rare: a policy does not keep a list of them. Set by whoever has
    # the policy. They come in pieces, each found quickly, however many there are. Columns may come and
    # go while pieces are gone through: what was removed by then is not given, and some may be left out.
    columns: Callable[[int], Iterator[Iterator[C]]]

    def __init__(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        """How many columns it has, leaves or not."""
        return self._count

    @abstractmethod
    def stored(self, column: C, now: float) -> None:
        """The column was stored, with `mark` None. A candidate at once if its `ref_count` is 0."""

    @abstractmethod
    def used(self, path: Sequence[C], now: float) -> None:
        """A prefix was hit: its columns in order, one at least.

        Called before the driver stamps them (`used_at`, `uses`), so that the time between two uses can
        be seen. `leaf` follows for the last one, when it is unpinned or at once.
        """

    @abstractmethod
    def leaf(self, column: C) -> None:
        """Its `ref_count` has become 0: the last child or pin was removed. It is stamped already."""

    @abstractmethod
    def victim(self, now: float) -> C | None:
        """The leaf to displace next; None if no column has `ref_count` 0. It stays until it is
        `displaced` or `removed`. Columns that are let go of first change queues now, also for a caller
        that displaces nothing, as promotion does: they would do so for the next one."""

    def victims(self, now: float, most: int) -> list[C]:
        """The leaf to displace next, and the columns before it that are next once it is displaced, one
        after the other: at most so many, and perhaps fewer. Empty if no column has `ref_count` 0.

        Columns before a leaf are looked at without asking whether the policy has them: the caller takes
        them only as far as it does. So `mark` may be that of the queue of another priority, even of
        another policy. They stay until they are `displaced` or `removed`.
        """
        column = self.victim(now)
        return [] if column is None else [column]

    def displaced(self, run: Sequence[C], now: float) -> None:
        """What `victim` or `victims` has just returned, or its beginning, was displaced. The same as for
        one after the other, with `victim` and `leaf` between two; `leaf` for the parent of the last one
        follows."""
        for column in run:
            self.removed(column)

    def stored_all(self, columns: Sequence[C], now: float) -> None:
        """The same as `stored` for each."""
        for column in columns:
            self.stored(column, now)

    @abstractmethod
    def removed(self, column: C) -> None:
        """It expired or was purged; a purge also removes columns that have children. Called before
        `leaf` for its parent."""
