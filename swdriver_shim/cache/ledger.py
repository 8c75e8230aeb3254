"""The ledger: which columns are cached for whom and until when, which are displaced, why some are
missed.

It is pure: no bytes, no clocks, no sockets, no threads. The caller passes the time in, moves the bytes,
and reports how that went. This class is the whole interface; `tier2` is the part for tier 2.

- `match` finds the longest prefix that can be refilled, and pins its slots until `release`.
- `begin_store` gives slots to the columns of a prompt; `finish_store` follows.
- `sweep` and `reclaim` do long work in small pieces: expiry, quotas, deletes, and removing what was
  purged.
- `take_clears` gives the slots that agents have to empty before they are used again.

All shards of a group keep a column in the same slot, so a slot is a number here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from swdriver_shim import loops
from swdriver_shim.cache import misses, snapshot
from swdriver_shim.cache.allocator import SlotAllocator
from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.loans import Loans
from swdriver_shim.cache.lookup import Lookup, Match, columns_of
from swdriver_shim.cache.misses import ColumnState, KeyedColumn
from swdriver_shim.cache.object_ledger import ObjectLedger
from swdriver_shim.cache.prefix_map import Account, Column, State
from swdriver_shim.cache.promotion import PromotionPlanner
from swdriver_shim.cache.prompt_deletes import PromptDeletes
from swdriver_shim.cache.purge_dates import NEVER_YET
from swdriver_shim.cache.reasons import GHOSTS_MIN, Reason, Removal, Tally
from swdriver_shim.cache.recalls import Recall, RecallPlanner, RestorePlanner
from swdriver_shim.cache.request_log import RequestRecord
from swdriver_shim.cache.reuse.sample import Sample
from swdriver_shim.cache.slots import Clear, Pool, Use
from swdriver_shim.cache.snapshot import LedgerSnapshot
from swdriver_shim.cache.spills import Spill, SpillPlanner
from swdriver_shim.cache.stock import NAMESPACES_MAX, Stock
from swdriver_shim.cache.stores import Store, StorePlanner
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, DisplacementName, OrgPolicies, Rules

SLICE: Final = 128  # columns of long work in one piece: about a millisecond
ALL_DEPTHS: Final = range(sys.maxsize)


class Ledger:
    def __init__(self, layout: Layout, model: str = "", *, ghosts_min: int = GHOSTS_MIN) -> None:
        self.layout = layout
        self._stock = Stock(layout, model, ghosts_min)
        self._slots = self._stock.slots
        self._spills = SpillPlanner(self._stock)
        self._allocator = SlotAllocator(self._stock, self._spills)
        self._stores = StorePlanner(self._stock, self._allocator, self._spills)
        self._recalls = RecallPlanner(self._stock, self._allocator, self._spills)
        self._restores = RestorePlanner(self._stock)
        self._promotion = PromotionPlanner(self._stock, self._recalls)
        self._deletes = PromptDeletes(self._stock)
        self.tier2 = Tier2(self._stock, self._spills, self._recalls, self._restores, self._promotion)
        # Also part of the interface
        self.refuse = self._restores.refuse
        self._loans = Loans(self._stock)
        self.lend = self._loans.lend
        self.lose = self._restores.lose
        self.tags = self._stock.tags
        self.take_clears = self._slots.take_clears
        self.orgs_of_request = self._stock.requests.orgs_of
        self.newest_requests = self._stock.requests.newest
        self.find_conversation = self._stock.conversations.find
        # What each org has stored, asked for and got, and the slots of each group; read only
        self.accounts: Mapping[str, Account] = self._stock.accounts
        self.pools: Sequence[Pool] = self._slots.pools
        self.overstay = self._stock.overstay

    def objects(self) -> ObjectLedger:
        """For columns that stand alone. Raises ValueError for a layout of prefixes."""
        return ObjectLedger(self._stock, self._spills)

    # Intent

    def set_policies(
        self, policies: Mapping[str, OrgPolicies], now: float, tags: Mapping[str, bytes] | None = None
    ) -> None:
        """Replace all orgs' policies, also for stored columns. Orgs without one get the default.

        `tags`: the isolation tags of all orgs that are served, to purge tier 2 of orgs that have sent no
        request yet. Orgs without one are dropped once nothing of them is left. None: all are served.
        """
        self._stock.set_policies(policies, now, tags)
        for account in self._stock.accounts.values():
            self._spills.grown(account)

    def set_displacement(self, org: str, name: DisplacementName, now: float) -> None:
        """Use another displacement policy, also for stored columns, until policies are set again."""
        self._stock.set_displacement(org, name, now)

    def set_orgs_with_keys(self, orgs: Collection[str]) -> None:
        """The orgs that have a data key, so that their columns can be encrypted in tier 2."""
        self._stock.orgs_with_keys = frozenset(orgs)

    def set_slot_limit(self, group: int, slots: int) -> None:
        """Use so many slots of the group. Columns in higher slots are lost with the agents' memory."""
        pool = self.pools[group]
        is_lower = slots < pool.limit
        pool.set_limit(slots)
        if is_lower:
            for account in self.accounts.values():
                for column in [one for one in account.columns(group) if one.slot >= slots]:
                    self._stock.remove(column, Reason.DISPLACED)

    # Match

    def match(self, prompt: Prompt, now: float) -> Match:
        """The longest prefix of the prompt that every group can serve. `release` has to follow.

        Its tokens are counted as asked for, and as hit or as missed with a reason.
        """
        account = self._stock.account(prompt.org)
        match = self._find(account, prompt, 0, now)
        match.borrowed = self._stock.take_borrowed(match.columns[0])
        match.at_first = match.tokens - match.borrowed
        account.tally.requests += 1
        account.tally.requested += prompt.tokens
        match.count(account.tally)
        account.recorder.matched(match.keys, match.tokens, account.tally, now)
        account.turns.asked(match.keys)
        for hit in match.columns:
            account.stamp(hit, now)
            self._spills.used(account, hit)
        self._say_used(match.columns)
        self._promotion.requested(prompt, now)
        self._slots.begin(match, now)
        return match

    def rematch(self, match: Match, now: float, refilled: int = 0) -> Match:
        """Match the prompt again, since columns were refused, or recalled from tier 2. The result
        replaces the first match, also in what is counted.

        `refilled`: how many tokens have been refilled, even if their columns were removed since.
        """
        while match.replaced_by:
            match = match.replaced_by
        self.release(match)
        account = self._stock.account(match.prompt.org)
        match.count(account.tally, -1)
        found = match.replaced_by = self._find(account, match.prompt, refilled, now)
        found.at_first = min(match.at_first, max(found.tokens, refilled))
        before = {id(column) for hit in match.columns for column in hit}
        new = [column for column in found.columns[0] if id(column) not in before]
        found.borrowed = match.borrowed + self._stock.take_borrowed(new)
        account.tally.requested += found.asked - match.asked
        found.count(account.tally)
        for hit in found.columns:
            if more := [column for column in hit if id(column) not in before]:
                account.stamp(more, now)
                self._say_used([more])
        self._slots.begin(found, now)
        return found

    def _find(self, account: Account, prompt: Prompt, refilled: int, now: float) -> Match:
        lookup = Lookup(self._stock, prompt, now, prompt.memo)
        if lookup.misplaced:
            self._stock.remove_misplaced(lookup.misplaced)
            lookup = Lookup(self._stock, prompt, now)
        prompt.memo = {path.map: path.found for path in lookup.paths}
        columns, tokens = lookup.agree(prompt)
        slots = tuple([loops.current.numbers_of(hit, "slot") for hit in columns])
        match = Match(prompt, prompt.tokens, lookup.keys, tokens, columns, slots, refilled)
        if not max(tokens, refilled) and _is_in_other_namespace(account, prompt):
            match.missed[Reason.OTHER_NAMESPACE] = prompt.tokens
        elif max(tokens, refilled) < prompt.tokens:
            misses.set_missed(self._stock, match, lookup.paths, now)
            match.pending = lookup.pending(tokens // COLUMN_TOKENS)
        return match

    def _say_used(self, hits: Iterable[Sequence[Column]]) -> None:
        for listener in self._stock.listeners:
            for hit in hits:
                listener.used(hit)

    def recount(self, match: Match, now: float) -> None:
        """Find the reasons of its misses again, since tier 2 has answered. The prompt may be longer by
        now, and may be in use."""
        if match.is_counted and Reason.OTHER_NAMESPACE not in match.missed:
            tally = self._stock.account(match.prompt.org).tally
            match.count(tally, -1)
            paths = Lookup(self._stock, match.prompt_keys, now).paths
            misses.set_missed(self._stock, match, paths, now)
            match.count(tally)
            if match.record:
                known, match.record = match.record, match.to_record(match.record.at)
                self._stock.requests.replace(known, match.record)

    def release(self, match: Match) -> None:
        """The slots of the match are not read any more."""
        self._slots.end(match)

    def log_request(self, match: Match, now: float) -> None:
        """The load has ended. Keep its outcome, if the request has a name."""
        if match.prompt.request:
            match.record = match.to_record(now)
            self._stock.requests.add(match.record)

    def shorten(self, match: Match, tokens: int, reason: Reason) -> None:
        """Only so many tokens of the match were used: the others are missed, for this reason."""
        tally, lost = self._stock.account(match.prompt.org).tally, match.tokens - tokens
        if lost > 0:
            match.count(tally, -1)
            unused = max(match.tokens, match.refilled) - max(tokens, match.refilled)
            match.tokens = tokens
            for tokens_of in (match.unused, match.missed):
                tokens_of[reason] = tokens_of.get(reason, 0) + unused
            match.at_first = min(match.at_first, max(tokens, match.refilled))
            match.count(tally)

    def query(self, prompt: Prompt, now: float) -> int:
        """How many tokens `match` would give. Changes nothing, and counts nothing."""
        return Lookup(self._stock, prompt, now).agree(prompt)[1]

    # Store

    def begin_store(
        self,
        prompt: Prompt,
        verified: int,
        now: float,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        states: Collection[int] = (),
    ) -> Store:
        """Slots for the columns of the first `verified` tokens that are not stored yet; fewer if there
        is no room. `finish_store` has to follow.

        `first`: the token from which on the engine has KV of each group, if not from the start.
        `states`: after how many tokens it has the state of each state group. Those at the end of a
        column, of a unit where columns have units, or of all verified tokens are stored.
        """
        return self._stores.begin(prompt, verified, now, rules, first, states)

    def finish_store(
        self, store: Store, now: float, failed: Mapping[Column, Reason] | None = None
    ) -> None:
        """The columns are in their slots on every agent, except for those that failed."""
        self._stores.finish(store, now, failed)

    @property
    def is_short_of_room(self) -> bool:
        """Whether `tier2.begin_spill` should be called now, so that the next stores find room."""
        return self._spills.is_short_of_room

    # Verbs

    def delete(self, prompt: Prompt, *, shared: bool = False) -> Removal:
        """Delete a prompt's columns from its end on, up to the first that other prompts continue; with
        `shared` all of them. Of a long prompt `sweep` does the rest."""
        return self._deletes.begin(prompt, shared=shared)

    def set_priority(self, prompt: Prompt, priority: int, now: float, depths: range = ALL_DEPTHS) -> int:
        """Set the priority of the prompt's stored columns at these depths; returns how many."""
        account, columns = self._stock.account(prompt.org), self._stored(prompt, depths)
        for column in columns:
            if column.state is State.READY:
                account.removed(column)
            column.mark, column.terms = None, column.terms.but(priority=priority)
            if column.state is State.READY:
                account.queue(column).stored(column, now)
        return len(columns)

    def set_ttl(self, prompt: Prompt, seconds: int, depths: range = ALL_DEPTHS) -> int:
        """Give the prompt's stored columns at these depths a TTL of their own, which only shortens the
        policy's; returns how many those are."""
        columns = self._stored(prompt, depths)
        for column in columns:
            column.terms = column.terms.but(ttl=seconds)
            column.tier2_used_at = None  # files have the policy's TTL only
            if column.state is State.READY:
                self._stock.expiry.schedule(column)
        for column in columns:
            for listener in self._stock.listeners:
                listener.ttl_changed([column])
        keys = prompt.keys[depths.start : depths.stop]
        for prefix_map in self._stock.maps_of(prompt.maker):
            self._stock.deletes.delete(prefix_map, keys)
        return len(columns)

    def purge(
        self,
        org: str,
        namespace: Namespace | None = None,
        tag: bytes | None = None,
        now: float = NEVER_YET,
    ) -> Removal:
        """Remove all columns of the org, or of one namespace; from tier 2 always all. They are not found
        from here on; `reclaim` does the rest. What a sibling has stored of them before `now` is not
        borrowed.

        `tag`: the org's isolation tag, needed if it may have sent no request yet.
        """
        account = self._stock.account(org)
        for dates in (account.purges, account.tier2_purges):
            dates.note(now, namespace)
        return self._stock.purge(account, namespace, tag)

    def purge_tag(self, org: str, tag: bytes) -> Removal:
        """Remove all columns that carry this tag, of an org that has another one by now, or is deleted.
        They are not found from here on; `reclaim` does the rest."""
        return self._stock.purge_tag(self._stock.account(org), tag)

    def _stored(self, prompt: Prompt, depths: range) -> list[Column]:
        maps = self._stock.maps_of(prompt.maker)
        found = [column for prefix_map in maps for column in columns_of(prefix_map, prompt, depths)]
        return [column for column in found if column.state is not State.EMPTY]

    # Agents

    @property
    def is_reachable(self) -> bool:
        """Whether all agents are reachable. If not, nothing is served and nothing is displaced."""
        return self._stock.is_reachable

    @is_reachable.setter
    def is_reachable(self, value: bool) -> None:
        self._stock.is_reachable = value

    def finish_clears(self, clears: Sequence[Clear], *, is_done: bool) -> None:
        """All agents have emptied these slots; or, if not `is_done`, they have to be tried again."""
        (self._slots.cleared if is_done else self._slots.retry_clears)(clears)

    @property
    def lent_columns(self) -> int:
        """Since the start."""
        return self._loans.columns

    # Long work, in pieces

    def sweep(self, now: float, columns: int = SLICE) -> bool:
        """Remove expired columns, enforce quotas, abort uses that take too long, drop orgs that are not
        served any more, and move columns to another displacement policy, for about so many columns; and
        some of a long prompt that is deleted, and of copies in tier 2 that were purged. Whether there is
        more to do."""
        for use in self._slots.overdue(now):
            self._abort(use, now)
        self._loans.end(now)
        self._promotion.end(now)
        self._stock.drop_orgs(now, SLICE)
        expiry = self._stock.expiry
        columns -= expiry.catch_up(columns)
        due = expiry.take(now, columns)
        for column in reversed(due):  # no parent is a leaf, for a moment, before its turn
            self._stock.check_expiry(column, now)
        columns -= len(due)
        columns -= self._allocator.enforce_quotas(columns, now)
        has_more = self._deletes.remove_some() or columns <= 0 or expiry.is_behind
        has_more |= self._stock.forget_tier2()
        return (columns > 0 and self._stock.change_over(columns, now)) or has_more

    def reclaim(self, columns: int = SLICE) -> bool:
        """Remove about so many purged or lost columns. Whether there is more to do."""
        columns -= self._stock.remove_purged(columns)
        has_lost = self._restores.check_lost(columns)
        return self._stock.has_purged or has_lost

    def _abort(self, use: Use, now: float) -> None:
        match use:
            case Store():
                self.finish_store(use, now, dict.fromkeys(use.columns, Reason.AGENT_LOST))
            case Recall():
                self._recalls.finish(use, now, {})
            case Spill():
                self._spills.finish(use, [])
            case _:
                self._slots.end(use)

    # For people

    def explain(self, prompt: Prompt, now: float) -> dict[str, list[ColumnState]]:
        """The state of each column of the prompt, by group, as far as memory is concerned."""
        return self.explain_columns(prompt.maker, misses.all_columns(prompt), 0, now)

    def explain_columns(
        self, maker: Keys, columns: Sequence[KeyedColumn], first: int, now: float
    ) -> dict[str, list[ColumnState]]:
        """The state of these columns of a prompt, from the depth `first` on, by group."""
        return misses.explain(self._stock, maker, columns, first, now)

    def find_request(self, org: str, request: str) -> RequestRecord | None:
        """The outcome of a request; None if it is too old, or its org has another secret since."""
        found = self._stock.requests.find(org, request)
        return found if found and self._is_current(found.maker) else None

    def _is_current(self, maker: Keys) -> bool:
        account = self.accounts.get(maker.org)
        known = account.makers.get(maker.namespace) if account else None
        return known is not None and known.tag == maker.tag

    # Statistics

    def tally(self, org: str) -> Tally:
        """The requests of an org, which may have sent none yet."""
        return self._stock.account(org).tally

    def on_drop(self, call: Callable[[str], object]) -> None:
        """Call this with each org that is dropped, under the lock."""
        self._stock.on_drop.append(call)

    def add_listener(self, listener: Listener) -> None:
        """Notify this listener as well when columns can be served, and when they can't any more."""
        self._stock.listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        self._stock.listeners.remove(listener)

    def reuse(self, org: str, now: float) -> Sample | None:
        """A sample of the org's reuse of columns, to try other policies on. None for an unknown org. May
        be called without the lock."""
        account = self.accounts.get(org)
        if account is None:
            return None
        recorder = account.recorder
        log = recorder.log  # before its share, which may become smaller meanwhile
        column_bytes = self.layout.column_bytes
        freeing = self._slots.freeing
        free = min(
            (pool.free + freeing[at]) * group.columns_per_slot
            for at, (pool, group) in enumerate(zip(self.pools, self.layout.groups, strict=True))
        )
        return Sample(
            org=org,
            now=now,
            complete=recorder.complete,
            stride=recorder.share.stride,
            threshold=recorder.share.threshold,
            requests=account.tally.requests,
            requested=account.tally.requested,
            columns=recorder.columns,
            hit=account.tally.hits.total(),
            held_bytes=account.bytes,
            room_bytes=account.bytes + free * column_bytes,
            column_bytes=column_bytes,
            displacement=account.choice(now),
            log=log,
        )

    # Between two drivers, and for tests

    def snapshot(self, now: float, wall: float) -> LedgerSnapshot:
        """All columns that can be served, and are not being deleted. Nothing may be under way."""
        while self._deletes.remove_some() or self._stock.forget_tier2():
            pass
        return snapshot.take(self._stock, now, wall)

    def restore(
        self,
        left: LedgerSnapshot,
        keys: Callable[[str, Namespace], Keys | None],
        now: float,
        wall: float,
    ) -> list[list[int]]:
        """Restore the columns of an earlier ledger into this one, which has to be empty. Returns the
        slots of each group that have to be emptied before anything is served.

        `keys` of an org in a namespace; None for an org that is not served any more.
        """
        return snapshot.restore(self._stock, left, keys, now, wall)


def _is_in_other_namespace(account: Account, prompt: Prompt) -> bool:
    """Whether the prompt is stored in another of the org's newest namespaces. Each costs a hash."""
    own = prompt.maker.namespace
    return any(
        (key := prompt.begins_as(account.makers[namespace])) is not None and key in maps[0].columns
        for namespace, maps in islice(reversed(account.maps.items()), NAMESPACES_MAX)
        if namespace != own
    )


class Tier2:
    """The ledger's side of tier 2: which columns to copy there, to recall, and to remove there.

    The caller moves the bytes. What begins or is taken has to be finished.
    """

    def __init__(
        self,
        stock: Stock,
        spills: SpillPlanner,
        recalls: RecallPlanner,
        restores: RestorePlanner,
        promotion: PromotionPlanner,
    ) -> None:
        self._stock = stock
        # Copying there
        self.begin_spill = spills.begin
        self.seconds_left = stock.slots.seconds_left
        self.finish_spill = spills.finish
        # Recalling columns
        self.search = recalls.search
        self.gain = recalls.gain
        self.begin_recalls = recalls.begin
        self.begin_borrows = recalls.borrow
        self.removals = recalls.removals
        self.has = recalls.has
        self.skip_recalls = recalls.skip
        self.begin_restore = restores.begin
        self.start_recall = recalls.start
        self.finish_recall = recalls.finish
        # Recalling columns before they are requested
        self.set_promotion_budget = promotion.set_budget
        self.next_promotion = promotion.next
        self.is_promotion_wanted = promotion.is_wanted
        self.begin_promotion = promotion.begin
        self.hold_promoted = promotion.hold
        # Removing there
        self.take_deletes = stock.deletes.take
        self.finish_deletes = stock.deletes.finish
        self.take_purge = stock.deletes.take_purge
        self.finish_purge = stock.deletes.finish_purge
        self.repeat_deletes = stock.repeat_tier2_deletes
        # Statistics
        self.spilled = spills.spilled
        self.recalled = recalls.recalled
        self.borrowed = recalls.borrowed
        self.promoted = promotion.promoted

    @property
    def ttl_seconds_max(self) -> float:
        """No column lives longer, of those that have a TTL."""
        return self._stock.ttl_seconds_max
