"""What the scheduler's half has all workers do in a step, and what each of them says of it.

Orders go with vLLM's own metadata of the step, so that they come in the order of the steps and before
the blocks they speak of are used by anybody else. How loads went comes back with the step's output. How
saves went comes over the line between the halves: they end when they end, also while no step runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct


class ColumnOrder(NamedTuple):
    """One column between its slot and the engine's blocks. `blocks` are all of its unit's, of which it
    is this part."""

    slot: int
    key: bytes
    part: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Bring these columns, by group, or send them out."""

    number: int
    request: str
    tag: bytes
    columns: tuple[list[ColumnOrder], ...]

    @property
    def blocks(self) -> set[int]:
        return {block for of in self.columns for one in of for block in one.blocks}


@dataclass(slots=True)
class Step:
    """For all workers, in one step of the engine."""

    loads: list[Order] = field(default_factory=list)  # before its layers are computed
    loads_ahead: list[Order] = field(default_factory=list)  # beside it; the requests wait for them
    stores: list[Order] = field(default_factory=list)  # once it is computed
    # Saves that have to be over before the step begins: their blocks are somebody else's in it.
    over_first: list[int] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)  # requests whose blocks are kept for their saves


class RefusedColumn(NamedTuple):
    """A column of a load did not come: which of the group's columns in the order, and why not."""

    group: int
    at: int
    miss: str


@dataclass(slots=True)
class LoadResult:
    """How a load went, by as many workers as have told."""

    workers: int = 1
    refused: list[RefusedColumn] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class WorkerReport:
    """What workers say with a step's output."""

    loads: dict[int, LoadResult] = field(default_factory=dict)

    def add(self, other: WorkerReport) -> WorkerReport:
        for number, loaded in other.loads.items():
            mine = self.loads.get(number)
            if mine is None:
                self.loads[number] = loaded
                continue
            mine.workers += loaded.workers
            mine.refused += loaded.refused
            mine.bytes += loaded.bytes
            mine.seconds = max(mine.seconds, loaded.seconds)
        return self


class SaveResult(Struct, frozen=True):
    """How a save went: over the line. Columns of it that did not go out, by group and index."""

    store: int
    failed: list[tuple[int, int]]
    bytes: int
    seconds: float
    dropped: bool = False  # nothing of it was tried: too much was waiting, or its blocks were wanted
