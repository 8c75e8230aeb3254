"""Borrowing a prompt's columns from a sibling: it is asked what it has, and agents copy the bytes.

Columns are borrowed where that is expected to be faster than computing them, by what both have taken.
A load that comes meanwhile waits for them as for a recall; what comes too late for it is there for the
next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

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
from swdriver_shim.data_plane.tier2 import SEARCHES_AHEAD_MAX, Tier2Transfers
from telemetry.histogram import Histogram

log = logging.getLogger(__name__)

ORGS_MAX: Final = 1024  # whose break-even is kept


class Borrowing:
    """All methods may be called from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        lock: threading.Lock,
        transfers: Tier2Transfers,
        clock: Callable[[], float],
    ) -> None:
        """`lock` is the ledger's."""
        self.seconds: dict[str, Histogram] = {}  # of borrows, by path
        self.bytes: Counter[str] = Counter()  # by path
        self.outcomes: Counter[str] = Counter()  # of prompts
        self._fits: dict[str, LinearFit] = {}  # by path
        self._paces: dict[tuple[str, str], BreakEven] = {}  # by org and path
        self._ledger = ledger
        self._lock = lock
        self._transfers = transfers
        self._clock = clock

    def begin(self, prompt: HasKeys, sibling: Sibling) -> bool:
        """Borrow what is missing of a prompt that is about to be loaded. Returns at once: whether it has
        begun, or there is nothing to do."""
        with self._lock:
            start = self._ledger.tier2.has(prompt, self._clock())
            removals = self._ledger.tier2.removals(prompt)
        if start >= len(prompt.keys):
            self.outcomes["here"] += 1
            return True
        prompt = PromptKeys(prompt.maker, list(prompt.keys))
        return self._transfers.begin(
            prompt.keys[start],
            lambda: self._borrow(prompt, start, removals, sibling),
            SEARCHES_AHEAD_MAX,
        )

    def tokens_min(self, org: str) -> int | None:
        """From how many tokens on borrowing is faster than computing, over the path that was used last;
        None for never. The caller holds the lock."""
        layout = self._ledger.layout
        found = [pace for (name, _), pace in self._paces.items() if name == org]
        return found[-1].tokens_min(layout.token_bytes, layout.state_bytes) if found else 0

    def _borrow(self, prompt: HasKeys, start: int, removals: int, sibling: Sibling) -> None:
        try:
            loan = sibling.ask(prompt, start, self._clock())
        except Away as error:
            log.debug("Nothing is borrowed: %s", error)
            self.outcomes["away"] += 1
            return
        if len(loan.groups) != len(self._ledger.layout.groups) or not any(loan.groups):
            self.outcomes["nothing"] += 1
            return
        recalls: list[Recall] = []
        with self._lock:
            now = self._clock()
            tokens, size = self._ledger.tier2.gain(prompt, loan.groups, now)
            is_worth_it = self._pace(prompt.maker.org, sibling.path).is_worth_it(tokens, size, now)
            if tokens and is_worth_it:
                recalls = self._ledger.tier2.begin_borrows(prompt, loan.groups, removals, now)
        if recalls:
            is_whole = self._transfers.carry_back(
                recalls, lambda recall: self._fetched(recall, sibling, loan)
            )
            self.outcomes["borrowed" if is_whole else "partly"] += 1
        else:
            self.outcomes["slower" if tokens and not is_worth_it else "nothing"] += 1

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

    def _fetched(self, recall: Recall, sibling: Sibling, loan: Loan) -> dict[Column, Dates | Reason]:
        began = time.perf_counter()
        groups: dict[int, list[tuple[Column, RecallColumn, int]]] = {}
        with self._lock:
            for column, slot in recall.places:
                source = loan.groups[column.group][column.depth].slot
                into = RecallColumn(slot, column.key, recall.tag)
                groups.setdefault(column.group, []).append((column, into, source))

        def fetch(group: int, index: int, shard: ShardControl) -> Sequence[object]:
            shape, parts = self._ledger.layout.groups[group], groups[group]
            size = len(parts) * shape.slot_bytes[index]
            lender = sibling.lender(shape.name, index, size)
            return shard.borrow([into for _, into, _ in parts], [slot for *_, slot in parts], lender)

        found: dict[Column, Dates | Reason] = {}
        size = 0
        for group, answers in self._transfers.on_each_shard(fetch, groups).items():
            for (column, *_), missed in zip(groups[group], zip(*answers, strict=True), strict=True):
                if any(missed):
                    found[column] = Reason.NOT_BORROWED
                    continue
                its = loan.groups[column.group][column.depth]
                found[column] = Dates(loan.asked_at - its.stored_age, loan.asked_at - its.used_age)
                size += column.bytes
        seconds = time.perf_counter() - began
        if not size:
            sibling.leave()  # its agents do not answer, or it has forgotten what it said
            found = {}
        else:
            sibling.lent()
        with self._lock:
            self.bytes[sibling.path] += size
            self.seconds.setdefault(sibling.path, Histogram()).record(seconds)
            if size:
                self._fits[sibling.path].add(size, seconds)
        return found
