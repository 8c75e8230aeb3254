"""Borrowing a prompt's columns from a sibling: it is asked what it has, and agents copy the bytes.

Columns are borrowed where that is expected to be faster than computing them, by what both have taken.
A load that comes meanwhile waits for them as for a recall; what comes too late for it is there for the
next. All of it runs in threads of its own: a sibling that is slow holds up nothing of tier 2.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvss_agent.client import Miss
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.recalls import Recall
from swdriver_shim.cache.request_log import HasKeys, PromptKeys
from swdriver_shim.cache.spills import Dates
from swdriver_shim.data_plane.break_even import BreakEven, LinearFit
from swdriver_shim.data_plane.shard.columns import RecallColumn
from swdriver_shim.data_plane.shard.control import ShardControl
from swdriver_shim.data_plane.siblings import Away, Loan, Sibling
from swdriver_shim.data_plane.tier2 import Tier2Transfers, on_each
from swdriver_shim.fair_lock import FairLock
from telemetry.histogram import Histogram

log = logging.getLogger(__name__)

PROMPTS_AT_ONCE: Final = 8  # further ones are not borrowed
THREADS_MAX: Final = 32  # one for each shard of what is borrowed at once; an agent takes as many
ORGS_MAX: Final = 1024  # whose break-even is kept


@dataclass(slots=True)
class _Arriving:
    """Of one prompt."""

    loan: Loan
    until: float  # by the monotonic clock
    came: int = 0  # columns
    missed: int = 0
    refused: bool = True  # by our own agents, all of it


class Borrowing:
    """All methods may be called from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        lock: FairLock,
        transfers: Tier2Transfers,
        clock: Callable[[], float],
    ) -> None:
        """`lock` is the ledger's."""
        self.seconds: dict[str, Histogram] = {}  # of up to 64 columns, by path
        self.bytes: Counter[str] = Counter()  # by path
        self.outcomes: Counter[str] = Counter()  # of prompts
        self._fits: dict[str, LinearFit] = {}  # by path
        self._paces: dict[tuple[str, str], BreakEven] = {}  # by org and path
        self._ledger = ledger
        self._lock = lock
        self._transfers = transfers
        self._clock = clock
        self._running = 0
        self._prompts = ThreadPoolExecutor(PROMPTS_AT_ONCE, thread_name_prefix="borrow")
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="borrow shard")

    def count(self, outcome: str) -> None:
        """Of a prompt that is not borrowed."""
        with self._lock:
            self.outcomes[outcome] += 1

    def close(self) -> None:
        """Once the shards are closed: what is under way ends soon."""
        for pool in (self._prompts, self._threads):
            pool.shutdown(cancel_futures=True)

    def begin(self, prompt: HasKeys, sibling: Sibling) -> bool:
        """Borrow what is missing of a prompt that is about to be loaded. Returns at once: whether it has
        begun, or there is nothing to do. Nothing begins while an agent is lost, or after `close`."""
        prompt = PromptKeys(prompt.maker, list(prompt.keys))
        with self._lock:
            if not self._ledger.is_reachable:
                return False
            start = self._ledger.tier2.has(prompt, self._clock())
            removals = self._ledger.tier2.removals(prompt)
            if start >= len(prompt.keys):
                self.outcomes["in_memory"] += 1
                return True
            first = prompt.keys[start]
            if self._transfers.is_coming(first):
                return True
            if self._running >= PROMPTS_AT_ONCE:
                self.outcomes["busy"] += 1
                return False
            self._running += 1
            self._transfers.is_to_come(first)
            self._prompts.submit(self._run, prompt, start, removals, sibling)
        return True

    def _run(self, prompt: HasKeys, start: int, removals: int, sibling: Sibling) -> None:
        outcome = "failed"
        try:
            outcome = self._borrow(prompt, start, removals, sibling)
        except Exception:
            log.exception("Borrowing from %s has failed", sibling.spec.driver)
        finally:
            with self._lock:
                self._running -= 1
                self.outcomes[outcome] += 1
            self._transfers.has_come(prompt.keys[start])

    def _borrow(self, prompt: HasKeys, start: int, removals: int, sibling: Sibling) -> str:
        """What became of it."""
        try:
            loan = sibling.ask(prompt, start, self._clock())
        except Away as error:
            log.debug("Nothing is borrowed: %s", error)
            return "away"
        if len(loan.groups) != len(self._ledger.layout.groups) or not any(loan.groups):
            return "nothing"
        with self._lock:
            now = self._clock()
            tokens, size = self._ledger.tier2.gain(prompt, loan.groups, now)
            if tokens and not self._pace(prompt.maker.org, sibling.path).is_worth_it(tokens, size, now):
                return "slower"
            asked = loan.asked_at, removals
            recalls = self._ledger.tier2.begin_borrows(prompt, loan.groups, asked, now) if tokens else []
        if not recalls:
            return "nothing"
        arriving = _Arriving(loan, time.monotonic() + sibling.seconds_for(size))
        self._transfers.carry_back(recalls, lambda recall: self._fetched(recall, sibling, arriving))
        if arriving.came:
            sibling.lent()
            return "partly" if arriving.missed else "borrowed"
        if arriving.refused:
            return "refused"
        sibling.leave()  # its agents do not answer, or it has forgotten what it said
        return "failed"

    def _pace(self, org: str, path: str) -> BreakEven:
        """The caller holds the lock."""
        found = self._paces.get((org, path))
        if found is None:
            if len(self._paces) >= ORGS_MAX:
                del self._paces[next(iter(self._paces))]
            transfers, fit = self._transfers, self._fits.setdefault(path, LinearFit())
            found = self._paces[org, path] = BreakEven(
                [fit, transfers.refilling], transfers.pace(org).computing
            )
        return found

    def _fetched(
        self, recall: Recall, sibling: Sibling, arriving: _Arriving
    ) -> dict[Column, Dates | Reason]:
        """Empty where it is too late for any."""
        began, loan = time.monotonic(), arriving.loan
        seconds_left = arriving.until - began
        groups: dict[int, list[tuple[Column, RecallColumn, int]]] = {}
        with self._lock:
            for column, slot in recall.places:
                source = loan.groups[column.group][column.depth].slot
                into = RecallColumn(slot, column.key, recall.tag)
                groups.setdefault(column.group, []).append((column, into, source))
        if seconds_left <= 0:
            arriving.missed += len(recall.places)
            return {}

        def fetch(group: int, index: int, shard: ShardControl) -> Sequence[Miss | None]:
            lender = sibling.lender(self._ledger.layout.groups[group].name, index, seconds_left)
            parts = groups[group]
            return shard.borrow([into for _, into, _ in parts], [slot for *_, slot in parts], lender)

        found: dict[Column, Dates | Reason] = {}
        size = 0
        for group, answers in on_each(self._threads, self._transfers.shards, fetch, groups).items():
            for (column, *_), missed in zip(groups[group], zip(*answers, strict=True), strict=True):
                if why := set(missed) - {None}:
                    found[column] = Reason.NOT_BORROWED
                    arriving.missed += 1
                    arriving.refused &= why == {Miss.REFUSED}
                    continue
                its = loan.groups[column.group][column.depth]
                found[column] = Dates(loan.asked_at - its.stored_age, loan.asked_at - its.used_age)
                arriving.came += 1
                size += column.bytes
        seconds = time.monotonic() - began
        with self._lock:
            self.bytes[sibling.path] += size
            self.seconds.setdefault(sibling.path, Histogram()).record(seconds)
            if size:
                self._fits[sibling.path].add(size, seconds)
        return found if size else {}
