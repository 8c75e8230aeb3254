"""Orders of the scheduler to all workers in a step, and what each worker reports.

Orders are part of vLLM's metadata of the step, so they arrive in the order of steps and before anybody
else uses their blocks. Results of loads come with the step's output. Results of saves come over the
connection to the worker, since saves may end while no step runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct


class ColumnOrder(NamedTuple):
    """A column to copy between its slot and blocks. `blocks` are those of its unit, and `part` is the
    column's place in the unit. Of a state there is one block."""

    slot: int
    key: bytes
    part: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Columns of one request to load or to save, by group. `shown`: the request's name for people."""

    number: int
    request: str
    shown: str
    tag: bytes
    columns: tuple[list[ColumnOrder], ...]

    @property
    def blocks(self) -> set[int]:
        return {block for of in self.columns for one in of for block in one.blocks}


@dataclass(slots=True)
class Step:
    """The orders of one step of the engine."""

    loads: list[Order] = field(default_factory=list)  # while its layers are computed
    loads_ahead: list[Order] = field(default_factory=list)  # in the background, while the requests wait
    stores: list[Order] = field(default_factory=list)  # after it is computed
    # Saves that have to end before the step: other requests use their blocks in it.
    over_first: list[int] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)  # requests whose blocks their saves still need
    is_idle: bool = False  # nothing is computed in it


class RefusedColumn(NamedTuple):
    """A column of a load that failed: its place in the group's columns of the order, and why."""

    group: int
    at: int
    miss: str


@dataclass(slots=True)
class LoadResult:
    """The result of a load, combined from so many workers."""

    workers: int = 1
    refused: list[RefusedColumn] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    def add(self, other: LoadResult) -> None:
        self.workers += other.workers
        self.refused += other.refused
        self.bytes += other.bytes
        self.seconds = max(self.seconds, other.seconds)


@dataclass(slots=True)
class WorkerReport:
    """The results of loads that workers report with a step's output."""

    loads: dict[int, LoadResult] = field(default_factory=dict)

    def add(self, other: WorkerReport) -> WorkerReport:
        for number, loaded in other.loads.items():
            if number in self.loads:
                self.loads[number].add(loaded)
            else:
                self.loads[number] = loaded
        return self


class SaveResult(Struct, frozen=True):
    """The result of a save. `failed` are its failed columns, by group and index."""

    store: int
    failed: list[tuple[int, int]]
    bytes: int
    seconds: float
    dropped: bool = False  # given up: too many saves were waiting, or its blocks were needed
