"""Columns, and what a driver does with a displacement policy, without the rest of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from swdriver_shim import loops
from swdriver_shim.cache.displacement import Changeover, Competition, DisplacementPolicy

PIECE = 21  # columns that are listed at once


@dataclass(slots=True, eq=False)
class Column:
    key: bytes
    parent: Column | None = None
    used_at: float = 0.0
    stored_at: float = 0.0
    uses: int = 0
    needs: int = 0
    bytes: int = 4096
    tail: bool = False
    turn: int = 0
    ref_count: int = 0
    mark: Any = None
    terms: int = field(init=False)  # nothing but the turn

    def __post_init__(self) -> None:
        self.terms = self.turn


class Driver:
    """What the driver does with a policy, and nothing else."""

    def __init__(self, policy: DisplacementPolicy[Column]) -> None:
        self.columns: dict[bytes, Column] = {}
        self.use_policy(policy)

    def use_policy(self, policy: DisplacementPolicy[Column]) -> None:
        self.policy = policy
        policy.columns = self._listed

    def change_policy(self, policy: DisplacementPolicy[Column]) -> None:
        """From the one in use, which has columns."""
        self.use_policy(Changeover(self.policy, policy, self._listed, self.use_policy))

    def _listed(self, bits: int) -> Iterator[Iterator[Column]]:
        """The newest first, since it may be in any order, and in pieces that are small."""
        listed = loops.current.sampled(list(reversed(self.columns.values())), bits)
        while listed:
            piece, listed = listed[:PIECE], listed[PIECE:]
            yield filter(self.has, piece)

    def store(
        self, name: str, now: float, parent: Column | None = None, *, tail: bool = False
    ) -> Column:
        needs = parent.needs + 1 if parent else 0
        column = Column(key(name), parent, now, now, needs=needs, tail=tail)
        self.columns[column.key] = column
        if parent:
            parent.ref_count += 1
        self.policy.stored(column, now)
        return column

    def prompt(self, name: str, length: int, now: float) -> list[Column]:
        columns: list[Column] = []
        for depth in range(length):
            columns.append(self.store(f"{name}/{depth}", now, columns[-1] if columns else None))
        return columns

    def use(self, path: Sequence[Column], now: float) -> None:
        self.policy.used(path, now)
        for column in path:
            column.used_at = now
            column.uses += 1
        if not path[-1].ref_count:
            self.policy.leaf(path[-1])

    def remove(self, column: Column) -> None:
        del self.columns[column.key]
        self.policy.removed(column)
        if column.parent:
            self.release(column.parent)

    def release(self, column: Column) -> None:
        column.ref_count -= 1
        if not column.ref_count and self.has(column):
            self.policy.leaf(column)

    def has(self, column: Column) -> bool:
        """This one, and not another that was stored under its key later."""
        return self.columns.get(column.key) is column

    def displace(self, now: float) -> Column | None:
        column = self.policy.victim(now)
        if column:
            del self.columns[column.key]
            self.policy.displaced([column], now)
            if column.parent:
                self.release(column.parent)
        return column

    def leaves(self) -> set[Column]:
        return {column for column in self.columns.values() if not column.ref_count}


def may_change(policy: DisplacementPolicy[Column]) -> TypeGuard[Competition[Column]]:
    """Whether it is a competition in which another one may win now."""
    return (
        isinstance(policy, Competition)
        and bool(policy._miniatures)
        and not isinstance(policy._active, Changeover)
    )


def key(name: str) -> bytes:
    """Scattered as real ones are, the same in every run."""
    return random.Random(name).randbytes(16)


def path_to(column: Column) -> list[Column]:
    path = [column]
    while path[-1].parent:
        path.append(path[-1].parent)
    return path[::-1]
