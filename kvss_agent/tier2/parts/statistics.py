"""What a store of tier 2 counts and measures."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Removed
from kvss_agent.tier2.fault_log import FaultLog


class Outcome(StrEnum):
    """The result of a spill. A Miss means that the slot did not hold the column, or REFUSED."""

    STORED = "stored"
    ALREADY = "already"  # the column is there
    FULL = "full"  # no room under the org's cap or the store's, nor anything that could be evicted
    FAILED = "failed"  # the backend's fault, see the count of faults
    LATE = "late"  # others have the budget of the links for longer than a spill waits


@dataclass(frozen=True, slots=True)
class Receipt:
    """The purge is done: of what the scope held, nothing is left."""

    columns: int
    bytes: int
    finished_at: float  # seconds since 1970


@dataclass(slots=True)
class Work:
    """What was done of one kind since the start."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    seconds_max: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Plain numbers at one moment. Counts are since the start, by reason."""

    columns: int
    bytes: int  # held by files, or promised to writers
    cap_bytes: int
    orgs: Mapping[str, tuple[int, int]]  # by tag in hex: bytes held, cap
    in_flight: int
    properties: Mapping[str, bool | int]
    spills: Mapping[str, int]  # by Outcome or Miss
    recalls: Mapping[str, int]  # HIT, or by Miss
    faults: Mapping[str, int]  # by Fault
    last_fault: str
    evicted: Removed
    damaged: int  # files removed because their seal did not hold
    expired: int
    overstay_seconds_max: float  # how long one of those lay here beyond its time
    work: Mapping[str, Work]  # by the method's name


@dataclass(slots=True)
class Counts:
    """Counts and times since the start."""

    spills: Counter[str] = field(default_factory=Counter)
    recalls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    last_fault: str = ""
    evicted_columns: int = 0
    evicted_bytes: int = 0
    damaged: int = 0
    expired: int = 0
    overstay_max: float = 0.0
    work: dict[str, Work] = field(default_factory=dict)
    log: FaultLog = field(default_factory=FaultLog)

    @contextlib.contextmanager
    def measured(self, kind: str, count: int = 1) -> Iterator[Work]:
        """Each column of a batch takes as long as the batch."""
        work = self.work.setdefault(kind, Work())
        start = time.perf_counter()
        try:
            yield work
        except Failed as failed:
            self.count_fault(failed)
            raise
        finally:
            seconds = time.perf_counter() - start
            work.count += count
            work.seconds += seconds * count
            work.seconds_max = max(work.seconds_max, seconds)

    def count_fault(self, failed: Failed) -> None:
        self.faults[failed.fault] += 1
        self.last_fault = str(failed)
        self.log.note("Tier 2", failed)

    def count_evicted(self, victims: Mapping[Address, int]) -> None:
        self.evicted_columns += len(victims)
        self.evicted_bytes += sum(victims.values())

    @contextlib.contextmanager
    def faults_counted(self) -> Iterator[None]:
        """Count a failure of housekeeping. Whoever caused it has an answer of its own."""
        try:
            yield
        except Failed as failed:
            self.count_fault(failed)
