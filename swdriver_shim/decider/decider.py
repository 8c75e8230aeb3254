"""The driver of an engine that decides in one process and moves bytes in others.

The `Decider` is in the process that decides, over stand-ins of the `Shard`s of the other processes. The
engine reports how each transfer went:

    load = decider.begin_load(prompt)     # load.match: slots to refill from, pinned until end_load
    decider.end_load(load, used)          # what was refused is not served again
    store = decider.begin_store(prompt, verified)     # store.places: slots to evict to
    decider.end_store(store, failed)

`Driver` is a decider that moves bytes itself. No exception of an agent reaches the engine: a column that
can't be had is a miss with its reason.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from kvss_agent.client import Miss
from kvss_agent.data_plane.constants import DATA_KEY_BYTES
from kvss_agent.wall_clock import WallClock
from swdriver_shim.cache import snapshot
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.misses import ColumnState, KeyedColumn, all_columns, whole_columns
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.request_log import HasKeys, RequestRecord
from swdriver_shim.cache.snapshot import LedgerSnapshot
from swdriver_shim.cache.stores import Store
from swdriver_shim.cache_map.follower import Follower
from swdriver_shim.data_plane.borrowing import Borrowing
from swdriver_shim.data_plane.shard.control import ShardControl
from swdriver_shim.data_plane.siblings import Sibling, Siblings
from swdriver_shim.data_plane.tier2 import (
    SEARCHES_AHEAD_MAX,
    Tier2Transfers,
    reason_of,
    warn_of_damage,
)
from swdriver_shim.decider.housekeeping import Housekeeper
from swdriver_shim.decider.removals import Removals
from swdriver_shim.decider.shard_threads import ShardThreads
from swdriver_shim.decider.statistics import Statistics
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.lending import LentColumn
from swdriver_shim.policy import AS_USUAL, DisplacementName, OrgPolicies, Rules

log = logging.getLogger(__name__)

COLUMNS_AT_ONCE: Final = 128  # of one prompt, which may have 65,536
SETTLED_SECONDS: Final = 5.0  # after which an agent has applied an evict, nearly always
SETTLING_SECONDS: Final = 0.03  # that a sibling waits for it; the bytes may take 0.2 s more, in all 0.25
UNSETTLED_SECONDS: Final = 1.0  # for which no sibling waits after one that did so in vain
NO_POLICIES: Final[Mapping[str, OrgPolicies]] = MappingProxyType({})
NO_KEYS: Final[Mapping[str, bytes]] = MappingProxyType({})
Permit = Callable[[], bool]  # whether the caller still may. Asked again when the effect takes place


def always() -> bool:
    """The permit of a caller that can't be refused."""
    return True


class Snapshots(NamedTuple):
    """Where snapshots are kept, the keys of orgs that are served, by namespace, and what holds for what
    is restored from the start: see `Decider.set_policies` and `set_data_keys`."""

    directory: Path
    keys: Callable[[str, Namespace], Keys | None]
    policies: Mapping[str, OrgPolicies] = NO_POLICIES
    tags: Mapping[str, bytes] | None = None
    data_keys: Mapping[str, bytes] = NO_KEYS

    @property
    def path(self) -> Path:
        return self.directory / snapshot.NAME


class Load(NamedTuple):
    """A prompt that is being loaded: what is in memory, and the lookup in tier 2 for the rest."""

    match: Match
    lookup: threading.Event | None

    @property
    def pending(self) -> int:
        """How many more tokens may arrive soon."""
        match, is_known = self.match, self.lookup is None or self.lookup.is_set()
        return match.pending if is_known else match.asked - max(match.tokens, match.refilled)


class Decider:
    """All methods may be called from any thread."""

    def __init__(
        self,
        layout: Layout,
        model: str,
        shards: Sequence[Sequence[ShardControl]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`shards` of each group, in the layout's order. `wall_clock`: a `WallClock`, unless given.
        `snapshots`: to continue where the last driver stopped."""
        if [group.shards for group in layout.groups] != [len(of) for of in shards]:
            raise ValueError("there is one shard for each that the layout names")
        self.layout = layout
        self.ledger = Ledger(layout, model)
        self._lock = FairLock()
        woken = threading.Event()
        self._wake = woken.set
        self._clock = clock
        self._wall_clock = wall_clock = wall_clock or WallClock()
        self._snapshots = snapshots
        self._follower: Follower | None = None
        self._served_tags: Mapping[str, bytes] | None = None  # by org; None: all are served
        self._shard_threads = ShardThreads(shards)
        self._tier2 = Tier2Transfers(
            self.ledger,
            self._lock,
            shards,
            clock=clock,
            wall_clock=wall_clock,
            on_change=self._wake,
            is_served=self.is_served,
        )
        self._settles_from = -math.inf  # before that no sibling waits for agents
        self.siblings = Siblings()
        self.borrowing = Borrowing(self.ledger, self._lock, self._tier2, clock)
        self.statistics = Statistics(self.ledger, self._lock, self._tier2, self._clock)
        self._housekeeper = Housekeeper(
            self.ledger, self._lock, self._shard_threads, self._tier2, clock=clock, woken=woken
        )
        self.removals = Removals(self.ledger, self._lock, self._shard_threads, self._housekeeper, clock)
        for shard in self._shard_threads.all:
            shard.on_change = self._wake
        unknown: dict[int, list[int]] = {}
        if snapshots:
            # First, since what another policy lets expire is gone at once, in tier 2 as well.
            self.set_data_keys(snapshots.data_keys)
            self.set_policies(snapshots.policies, snapshots.tags)
            unknown = self._restore(snapshots)
        self._housekeeper.start(unknown)

    def close(self) -> None:
        """Requests from here on are misses."""
        self._housekeeper.stop()
        if self._snapshots and self._housekeeper.has_begun:
            self._write_snapshot(self._snapshots.path)
        self._shard_threads.close()
        self._housekeeper.close()
        self._tier2.close()
        self.borrowing.close()
        self.siblings.close()

    def _restore(self, snapshots: Snapshots) -> dict[int, list[int]]:
        """Restore the ledger of the last driver. Returns the slots of each group to empty first."""
        left = snapshot.read_once(snapshots.path, LedgerSnapshot)
        if left is None:
            # Without it a shard's snapshot is worthless: no purge would find what is in its slots.
            for shard in self._shard_threads.all:
                (snapshots.directory / shard.name).unlink(missing_ok=True)
            return {}
        unknown = self.ledger.restore(left, snapshots.keys, self._clock(), self._wall_clock())
        return {group: slots for group, slots in enumerate(unknown) if slots}

    def _write_snapshot(self, path: Path) -> None:
        with self._lock:
            taken = self.ledger.snapshot(self._clock(), self._wall_clock())
        try:
            snapshot.write(path, taken)
        except OSError as error:
            log.warning("No snapshot can be written for the next driver: %s", error)

    # Loads

    def query(self, prompt: Prompt) -> int:
        """How many tokens a load would give."""
        with self._lock:
            return self.ledger.query(prompt, self._clock())

    def begin_load(self, prompt: Prompt) -> Load:
        """Match the longest prefix in memory, and have the rest recalled from tier 2 meanwhile. Slots of
        the match are pinned until `end_load`, which has to follow."""
        with self._lock:
            match = self.ledger.match(prompt, self._clock())
        try:
            lookup = None
            if match.tokens < prompt.tokens and self.is_served(prompt.maker):
                lookup = self._tier2.seek(prompt, match.tokens // COLUMN_TOKENS, match)
        except BaseException:
            with self._lock:
                self.ledger.release(match)
            raise
        return Load(match, lookup)

    def rematch(self, load: Load, refilled: int | None = None) -> Load:
        """Match the prompt again. The result replaces the load, and `end_load` has to follow for it
        only. `refilled`: how many tokens have been refilled."""
        match = load.match
        with self._lock:
            again = self.ledger.rematch(
                match, self._clock(), match.refilled if refilled is None else refilled
            )
        return Load(again, load.lookup)

    def skip_if_slower(self, match: Match) -> None:
        """Do not refill what can be computed faster."""
        new, size = match.tokens - match.refilled, sum(column.bytes for column in new_columns(match))
        with self._lock:
            break_even = self.statistics.refills_of(match.prompt.org)
            if new > 0 and not break_even.is_worth_it(new, size, self._clock()):
                self.ledger.shorten(match, match.refilled, Reason.NOT_WORTH_IT)

    def record_refill(self, match: Match, seconds: float) -> None:
        """All of the match was refilled, which took so long."""
        if match.tokens > match.refilled:
            size = sum(column.bytes for column in new_columns(match))
            with self._lock:
                self.statistics.record_refill(match.prompt.org, size, seconds)

    def refuse(self, refused: Mapping[Column, Miss]) -> Reason:
        """These columns could not be refilled, and are not served again; those of a lost agent may be
        when it is back. Returns why the rest of the prompt is missed, unless it is matched again."""
        with self._lock:
            if Miss.LOST in refused.values():
                self.ledger.is_reachable = False
                self._wake()
                return Reason.AGENT_LOST
            for column, miss in refused.items():
                self.ledger.refuse(column, reason_of(miss))
        warn_of_damage(refused.values())
        first = min(refused, key=lambda column: column.depth)
        return reason_of(refused[first])

    def end_load(self, load: Load, used: tuple[int, Reason] | None = None) -> None:
        """Unpin the slots. `used`: how many tokens were used, if not all, and why the others were
        not."""
        with self._lock:
            if used is not None:
                self.ledger.shorten(load.match, *used)
            self.ledger.release(load.match)
            self.ledger.log_request(load.match, self._clock())

    def prefetch(self, org: str, continue_id: str) -> bool:
        """Recall a conversation that is about to continue from tier 2. Whether it is known."""
        with self._lock:
            prompt = self.ledger.find_conversation(org, continue_id)
        return prompt is not None and self.prefetch_prompt(prompt)

    def prefetch_prompt(self, prompt: HasKeys) -> bool:
        """Recall a prompt that is about to be loaded from tier 2. Whether tier 2 is asked."""
        return self.is_served(prompt.maker) and self._tier2.seek(prompt, 0) is not None

    def prefetch_ahead(self, prompt: HasKeys) -> bool:
        """The same for a prompt that may be loaded later: searches of loads go first."""
        if not self.is_served(prompt.maker):
            return False
        return self._tier2.seek(prompt, 0, most=SEARCHES_AHEAD_MAX) is not None

    def borrow(self, prompt: HasKeys, sibling: Sibling) -> bool:
        """Borrow what is missing of a prompt that is about to be loaded. Returns at once, whether it has
        begun."""
        return self.is_served(prompt.maker) and self.borrowing.begin(prompt, sibling)

    def borrow_from(self, prompt: HasKeys, sibling: str) -> bool:
        """The same by the name of a driver, which may be none of our siblings any more."""
        found = self.siblings.find(sibling)
        if found is None:
            self.borrowing.count("no_sibling")
        return found is not None and self.borrow(prompt, found)

    def prefetch_rest(self, prompt: HasKeys) -> bool:
        """Recall what is neither here nor coming of a prompt that is being borrowed, once that has come.
        Whether tier 2 is asked."""
        with self._lock:
            start = self.ledger.tier2.has(prompt, self._clock())
        return self._tier2.seek(prompt, start, most=SEARCHES_AHEAD_MAX) is not None

    def lend(self, prompt: HasKeys, start: int) -> list[list[LentColumn]]:
        """Where the columns of a prompt are, by group, for a sibling that has so many of them. Waits a
        moment for agents that have not applied their evicts: a sibling can't say after which evict it
        reads, and would find a slot as it was before. For a while none waits after one that did so in
        vain: siblings wait for each other, and take who answers late for gone."""
        with self._lock:
            if not self.is_served(prompt.maker):
                return []
            now = self._clock()
            lent = self.ledger.lend(prompt, start, now)
        is_new = any(column.stored_age < SETTLED_SECONDS for group in lent for column in group)
        if is_new and now >= self._settles_from:
            until = now + SETTLING_SECONDS
            is_settled = self._shard_threads.wait_applied(until, self._clock)
            if not is_settled and (now := self._clock()) >= until:
                self._settles_from = now + UNSETTLED_SECONDS
        return lent

    def prefetch_begun(self, prompt: Prompt) -> bool:
        """Recall the rest of a prompt that begins as others did, before its load. Its first column is
        the hint: without it in memory tier 2 is not asked, nor where nothing is missing."""
        if not self.is_served(prompt.maker):
            return False
        with self._lock:
            here = self.ledger.query(prompt, self._clock())
        columns = here // COLUMN_TOKENS
        if not 0 < columns < len(prompt.keys):
            return False
        return self._tier2.seek(prompt, columns, most=SEARCHES_AHEAD_MAX) is not None

    def computed(self, org: str, tokens: int, seconds: float) -> None:
        """The org's engine took so long to compute so many tokens. Refills are compared with that."""
        with self._lock:
            self._tier2.pace(org).computing.add(tokens, seconds)

    # Stores

    def begin_store(
        self,
        prompt: Prompt,
        verified: int,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        permit: Permit = always,
        states: Collection[int] = (),
    ) -> Store:
        """Slots for the columns of the first `verified` tokens that are not stored yet. `end_store` has
        to follow. None if the org is deleted or has another tag since the keys were made, or without
        `permit`."""
        with self._lock:
            if not (self.is_served(prompt.maker) and permit()):
                return Store()
            return self.ledger.begin_store(prompt, verified, self._clock(), rules, first, states)

    def is_served(self, maker: Keys) -> bool:
        """Whether the org is served, with the tag that the keys were made for. The answer holds for as
        long as the caller holds the lock."""
        return self._served_tags is None or self._served_tags.get(maker.org) == maker.tag

    def end_store(
        self,
        store: Store,
        failed: Mapping[Column, Reason],
        seconds: float = 0.0,
        permit: Permit = always,
    ) -> bool:
        """The columns are in their slots on every agent, except for those that failed; it took so long.
        Without `permit` none is served and all slots are emptied. Returns the permit."""
        with self._lock:
            if not (is_permitted := permit()):
                failed = dict.fromkeys(store.columns, Reason.PURGED)
            self.ledger.finish_store(store, self._clock(), failed)
            if store.columns:
                self.statistics.record_evict(store.columns, failed, seconds)
            if self.ledger.is_short_of_room or not is_permitted:
                self._wake()
            return is_permitted

    # Intent

    def set_policies(
        self, policies: Mapping[str, OrgPolicies], tags: Mapping[str, bytes] | None = None
    ) -> None:
        """Replace all orgs' policies, also for stored columns. `tags`: the isolation tags of orgs, to
        purge tier 2 of orgs that have sent no request yet. From then on nothing is stored under any
        other tag, whenever the store began."""
        with self._lock:
            self._served_tags = tags
            self.removals.forget((tags or {}).values())
            self.ledger.set_policies(policies, self._clock(), tags)
        self._wake()

    def set_data_keys(self, keys: Mapping[str, bytes]) -> None:
        """The keys of orgs whose columns are encrypted in tier 2: 32 bytes each. Without its key, an
        org's columns there can't be read by anybody. Raises ValueError for what is no key."""
        for key in keys.values():
            if len(key) != DATA_KEY_BYTES:
                raise ValueError(f"a data key has {DATA_KEY_BYTES} bytes")
        with self._lock:
            self._tier2.data_keys = dict(keys)
            self.ledger.set_orgs_with_keys(keys)

    def set_promotion_budget(self, bytes_per_second: float) -> None:
        """Recall prompts that are expected soon from tier 2, at most so many bytes per second; 0, the
        default, for never. Raises ValueError for objects."""
        with self._lock:
            self.ledger.tier2.set_promotion_budget(bytes_per_second)

    def set_displacement(self, org: str, name: DisplacementName) -> None:
        """Use another displacement policy, also for stored columns, until policies are set again."""
        with self._lock:
            self.ledger.set_displacement(org, name, self._clock())

    def set_priority(self, prompt: Prompt, priority: int) -> int:
        """Set the priority of the prompt's stored columns; returns how many those are."""
        return self._set(
            prompt, lambda depths: self.ledger.set_priority(prompt, priority, self._clock(), depths)
        )

    def set_ttl(self, prompt: Prompt, seconds: int) -> int:
        """Give the prompt's stored columns a TTL of their own; returns how many those are."""
        return self._set(prompt, lambda depths: self.ledger.set_ttl(prompt, seconds, depths))

    def _set(self, prompt: Prompt, change: Callable[[range], int]) -> int:
        """A few columns at a time: requests come in between."""
        columns = 0
        for first in range(0, len(prompt.keys) + 1, COLUMNS_AT_ONCE):  # there may be tails at the end
            with self._lock:
                columns += change(range(first, first + COLUMNS_AT_ONCE))
            time.sleep(0)  # as in `_explained`
        return columns

    # For brains

    def follow_cache(self) -> Follower | None:
        """What keeps in step with what is cached, for brains; the same each time. None for columns that
        stand alone."""
        if self.layout.groups[0].alone:
            return None
        with self._lock:
            if self._follower is None:
                ledger = self.ledger
                self._follower = Follower(
                    self.layout, ledger.accounts, self._lock, lambda: ledger.is_reachable
                )
                ledger.add_listener(self._follower)
            return self._follower

    # For people

    def explain(self, prompt: Prompt) -> dict[str, list[ColumnState]]:
        """The state of each column of the prompt, by group. Asks tier 2."""
        groups = self._explained(prompt.maker, all_columns(prompt))
        return self._with_tier2(groups, prompt, self.query(prompt) // COLUMN_TOKENS)

    def explain_keys(self, prompt: HasKeys) -> dict[str, list[ColumnState]]:
        """The state of each whole column of a prompt whose tokens are not known, by group. Asks tier
        2."""
        groups = self._explained(prompt.maker, whole_columns(prompt))
        ready = [takewhile(lambda one: one.state == "ready", columns) for columns in groups.values()]
        return self._with_tier2(groups, prompt, min(sum(1 for _ in run) for run in ready))

    def _explained(self, maker: Keys, columns: Sequence[KeyedColumn]) -> dict[str, list[ColumnState]]:
        """A few columns at a time: requests come in between."""
        groups: dict[str, list[ColumnState]] = {group.name: [] for group in self.layout.groups}
        for first in range(0, len(columns), COLUMNS_AT_ONCE):
            with self._lock:
                some = columns[first : first + COLUMNS_AT_ONCE]
                found = self.ledger.explain_columns(maker, some, first, self._clock())
            for name, states in found.items():
                groups[name] += states
            time.sleep(0)  # who waits for the interpreter, and not for the lock, has it now
        return groups

    def _with_tier2(
        self, groups: Mapping[str, list[ColumnState]], prompt: HasKeys, start: int
    ) -> dict[str, list[ColumnState]]:
        exists = self._tier2.look(prompt, start)
        return {
            name: [
                replace(column, tier2=True) if depth in depths else column
                for depth, column in enumerate(columns)
            ]
            for (name, columns), depths in zip(groups.items(), exists, strict=True)
        }

    def find_request(self, org: str, request: str) -> tuple[RequestRecord, float] | None:
        """The outcome of a request, and how many seconds ago it ended; None if it is too old, was never
        sent, or its org has another secret since."""
        with self._lock:
            found = self.ledger.find_request(org, request)
            return (found, self._clock() - found.at) if found else None

    def orgs_of_request(self, request: str) -> list[str]:
        """The orgs that have a request of this name."""
        with self._lock:
            return self.ledger.orgs_of_request(request)

    def newest_requests(self, org: str, most: int) -> list[tuple[RequestRecord, float]]:
        with self._lock:
            now = self._clock()
            return [(one, now - one.at) for one in self.ledger.newest_requests(org, most)]


def is_new(column: Column, match: Match) -> bool:
    """Whether the column is not refilled yet. Refilled tokens may end with a tail."""
    return column.depth * COLUMN_TOKENS + column.tokens > match.refilled


def new_columns(match: Match) -> Iterator[Column]:
    return (column for hit in match.columns for column in hit if is_new(column, match))
