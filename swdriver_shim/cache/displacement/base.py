"""What a displacement policy sees of a column, and what the driver asks of a policy.

The columns of an org's prompts form a forest: a column's parent is the one before it in the prompt, and
is worth nothing less than it. So room is made leaf-first, and a policy decides among leaves only. The
driver pins columns in use; a pin counts as a child does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar


class Displaceable(Protocol):
    """A column as policies see it. They write `mark` and nothing else; equality is identity."""

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
    def needs(self) -> int:
        """How many columns before it, in its prompt, it is worth nothing without."""

    @property
    def bytes(self) -> int: ...
    @property
    def tail(self) -> bool:
        """It has fewer tokens than a whole column: only the very same prompt goes on from it."""


C = TypeVar("C", bound=Displaceable)


class DisplacementPolicy(ABC, Generic[C]):
    """Which leaf goes next. One instance for each org and priority; no clock, no I/O, deterministic.
    `now` never goes back.

    Calls cost little each, whatever the number of columns: leaves wait in queues by what was known when
    they were queued, and are looked at again when they come to the front.
    """

    name: ClassVar[str]
    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        """The columns that are here, leaves or not."""
        return self._count

    @abstractmethod
    def stored(self, column: C, now: float) -> None:
        """It has come in, with `mark` None. A candidate at once if its `ref_count` is 0."""

    @abstractmethod
    def used(self, path: Sequence[C], now: float) -> None:
        """A prefix was hit: its columns in order, one at least.

        Called before the driver stamps them (`used_at`, `uses`), so that what has passed between two
        uses can be seen. `leaf` follows for the last one: when its pin goes, or at once.
        """

    @abstractmethod
    def leaf(self, column: C) -> None:
        """Its `ref_count` has become 0: the last child or pin was removed. It is stamped already."""

    @abstractmethod
    def victim(self, now: float) -> C | None:
        """The leaf that goes next; None if every column is held. It stays until it is `removed`."""

    @abstractmethod
    def removed(self, column: C) -> None:
        """It was displaced, expired or purged; a purge also removes columns that have children. Called
        before `leaf` for its parent."""

    @abstractmethod
    def check_integrity(self, columns: Iterable[C]) -> None:
        """AssertionError unless what is kept here fits these columns, which are all there are."""
