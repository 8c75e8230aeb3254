"""What a driver counts, by group and by org."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from swdriver_shim.cache.displacement import Choice
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.prefix_map import Account, Column, ExpiredColumns
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.data_plane.break_even import BreakEven
from swdriver_shim.data_plane.tier2 import Tier2Transfers
from swdriver_shim.fair_lock import FairLock
from telemetry.histogram import Histogram

ORGS_AT_ONCE: Final = 100  # below a millisecond

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class GroupState:
    name: str
    slots: int
    used: int
    free: int


@dataclass(frozen=True, slots=True)
class OrgState:
    """Tokens since the start, except for `bytes`, which is now. `hit_rate` is None without traffic."""

    org: str
    bytes: int
    requests: int
    requested_tokens: int
    hit_tokens: Mapping[str, int]  # by tier
    missed_tokens: Mapping[str, int]  # by reason
    hit_rate: float | None
    expired: ExpiredColumns
    displacement: Choice | None  # None: the policy names one


@dataclass(frozen=True, slots=True)
class BreakEvenTokens:
    """From how many tokens on a refill is faster than computing; 0 while too little was measured, None
    for never."""

    dram_tokens_min: int | None
    tier2_tokens_min: int | None


class TransferStats:
    """Evicts and refills of an org. A time is of all columns of a request, over all shards."""

    def __init__(self) -> None:
        self.evict, self.refill = Histogram(), Histogram()
        self.evicted_bytes = self.refilled_bytes = self.failed_columns = 0


class Statistics:
    def __init__(
        self,
        ledger: Ledger,
        lock: FairLock,
        tier2: Tier2Transfers,
        clock: Callable[[], float],
    ) -> None:
        """`lock` and `clock` are the ledger's."""
        self._ledger = ledger
        self._clock = clock
        self._lock = lock
        self._tier2 = tier2
        self._refills: dict[str, BreakEven] = {}  # by org
        self._transfers: dict[str, TransferStats] = {}  # by org
        ledger.on_drop(self._drop)

    def _drop(self, org: str) -> None:
        self._refills.pop(org, None)
        self._transfers.pop(org, None)

    def groups(self) -> list[GroupState]:
        with self._lock:
            return [
                GroupState(group.name, pool.limit, pool.used, pool.free)
                for group, pool in zip(self._ledger.layout.groups, self._ledger.pools, strict=True)
            ]

    def orgs(self) -> list[OrgState]:
        """Each org as it is at one time, but not all at the same."""
        with self._lock:
            accounts = list(self._ledger.accounts.values())
        return self._in_slices(accounts, self._state)

    def _state(self, account: Account) -> OrgState:
        return OrgState(
            account.org,
            account.bytes,
            account.tally.requests,
            account.tally.requested,
            dict(account.tally.hits),
            {reason.value: count for reason, count in (+account.tally.missed).items()},
            account.tally.hit_rate,
            replace(account.expired),
            account.choice(self._clock()),
        )

    def _in_slices(self, items: Sequence[T], read: Callable[[T], R]) -> list[R]:
        """Read each under the lock, a few at a time: requests come in between."""
        found: list[R] = []
        for begin in range(0, len(items), ORGS_AT_ONCE):
            with self._lock:
                found += [read(item) for item in items[begin : begin + ORGS_AT_ONCE]]
        return found

    def transfers(self) -> dict[str, TransferStats]:
        """By org. The values go on being counted."""
        with self._lock:
            return dict(self._transfers)

    def break_even(self) -> dict[str, BreakEvenTokens]:
        """As measured, for each org whose engines report how long computing takes."""
        with self._lock:
            orgs = self._tier2.orgs_that_compute
        return dict(zip(orgs, self._in_slices(orgs, self._break_even), strict=True))

    def break_even_of(self, org: str) -> BreakEvenTokens:
        """As measured, for one org."""
        with self._lock:
            return self._break_even(org)

    def _break_even(self, org: str) -> BreakEvenTokens:
        layout = self._ledger.layout
        refill = self.refills_of(org).tokens_min(layout.token_bytes, layout.state_bytes)
        return BreakEvenTokens(refill, self._tier2.tokens_min(org))

    # Under the lock

    def refills_of(self, org: str) -> BreakEven:
        """Refills compared with computing of the org's engines. The caller holds the lock."""
        found = self._refills.get(org)
        if found is None:
            computing = self._tier2.pace(org).computing
            found = self._refills[org] = BreakEven([self._tier2.refilling], computing)
        return found

    def record_refill(self, org: str, size: int, seconds: float) -> None:
        """The caller holds the lock."""
        self._tier2.refilling.add(size, seconds)
        stats = self._transfers_of(org)
        stats.refill.record(seconds)
        stats.refilled_bytes += size

    def record_evict(
        self, columns: Sequence[Column], failed: Mapping[Column, Reason], seconds: float
    ) -> None:
        """Columns of one org, one at least, of which some have failed. The caller holds the lock."""
        stats = self._transfers_of(columns[0].org)
        stats.failed_columns += len(failed)
        stats.evicted_bytes += sum(column.bytes for column in columns if column not in failed)
        if len(failed) < len(columns):
            stats.evict.record(seconds)

    def _transfers_of(self, org: str) -> TransferStats:
        return self._transfers.setdefault(org, TransferStats())
