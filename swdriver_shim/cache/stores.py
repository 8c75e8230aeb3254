"""Which columns of a prompt are stored, and into which slots."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from swdriver_shim import loops
from swdriver_shim.cache.allocator import SlotAllocator
from swdriver_shim.cache.lookup import key_before, over, tails_of
from swdriver_shim.cache.prefix_map import Column, PrefixMap, State, Terms, terms_of
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import Place, Use, prune
from swdriver_shim.cache.spills import SpillPlanner
from swdriver_shim.cache.stock import Stock
from swdriver_shim.cache.victims import Victims
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.policy import Rules, Tiers


@dataclass(slots=True, eq=False)
class Store(Use):
    """Columns of a prompt to evict, in this order, and the slot of each."""

    columns: list[Column] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def places(self) -> list[Place]:
        return list(map(Place, self.columns, self.slots))

    def add(self, columns: Iterable[Column], slots: Iterable[int]) -> None:
        self.columns += columns
        self.slots += slots


class _Run(NamedTuple):
    """Columns of one group to store: from column `first` up to token `verified`."""

    map: PrefixMap
    prompt: Prompt
    found: list[Column | None]  # for its keys, before the first run
    first: int
    verified: int
    have_from: int  # the engine has KV from this column on
    rules: Rules
    turn: int
    now: float


class StorePlanner:
    def __init__(self, stock: Stock, allocator: SlotAllocator, spills: SpillPlanner) -> None:
        self._stock = stock
        self._allocator = allocator
        self._spills = spills

    def begin(
        self,
        prompt: Prompt,
        verified: int,
        now: float,
        rules: Rules,
        first: Sequence[int],
        states: Collection[int],
    ) -> Store:
        """See `Ledger.begin_store`. `finish` has to follow."""
        if not 0 <= verified <= prompt.tokens:
            raise ValueError(f"the prompt has {prompt.tokens} tokens; {verified} can't be verified")
        if states and not 0 < min(states) <= max(states) <= verified:
            raise ValueError(f"there are no states after {max(states)} of {verified} verified tokens")
        if prompt.maker.unit_columns > 1:
            verified -= verified % prompt.maker.unit_tokens  # a unit has no tail
        stock, store = self._stock, Store()
        account = stock.account(prompt.org)
        if not rules.no_store:
            most = verified if rules.store_tokens_max is None else rules.store_tokens_max
            account.recorder.stored(prompt, min(verified, most), now)
        if not stock.is_reachable:
            pass  # not all agents could get it
        elif rules.no_store or account.policy.tiers is Tiers.NONE:
            self._not_stored(prompt, 0, verified, Reason.NO_STORE)
        else:
            whole, verified = verified, self._limited(prompt, verified, rules)
            self._not_stored(prompt, verified, whole, Reason.PREFIX_ONLY)
            if account.policy.tiers is Tiers.TIER2:
                stock.conversations.add(rules.continue_id, prompt)
            maps = stock.maps_of(prompt.maker)
            # Also behind the first one that is not there: what is out of order has to go before new
            # columns take its keys.
            found = [(one, *one.find(prompt.keys)) for one in maps]
            if not stock.layout.groups[0].alone:
                for one, columns, count in found:
                    stock.remove_misplaced(one.take_misplaced(columns, count))
            have = [-(-token // COLUMN_TOKENS) for token in first or [0] * len(maps)]
            turn = account.turns.of(prompt.keys)
            for (one, columns, _), have_from in zip(found, have, strict=True):
                if one.linked:
                    run = _Run(one, prompt, columns, 0, verified, have_from, rules, turn, now)
                    verified = min(verified, self._take_places(run, store))
            for (one, columns, _), group, have_from in zip(
                found, stock.layout.groups, have, strict=True
            ):
                run = _Run(one, prompt, columns, 0, verified, have_from, rules, turn, now)
                if group.is_state:
                    self._take_places_of_states(run._replace(have_from=0), states, store)
                elif not one.linked:
                    self._take_places_of_window(run, store)
        stock.slots.begin(store, now)
        return store

    def finish(self, store: Store, now: float, failed: Mapping[Column, Reason] | None = None) -> None:
        """See `Ledger.finish_store`."""
        stock = self._stock
        if not stock.slots.end(store):
            return
        self._spills.stored(store.columns)
        writing, do, arrived = State.WRITING, loops.current, store.columns
        if do.runs_of(arrived, "state") != [writing] or do.values_of(arrived, "slot") != store.slots:
            # Others were removed meanwhile.
            arrived = [one for one, slot in store.places if one.state is writing and one.slot == slot]
        if failed:
            for column in [one for one in arrived if one in failed]:
                stock.remove(column, failed[column])
            arrived = [one for one in arrived if one not in failed]
        for name, value in (("stored_at", now), ("used_at", now), ("tier2_used_at", None)):
            do.put(arrived, name, value)
        stock.arrived(arrived, now)

    def _limited(self, prompt: Prompt, verified: int, rules: Rules) -> int:
        """How many of the tokens are stored: the strictest limit, down to whole units. None of objects:
        nobody knows which of them are a prompt's beginning."""
        policy = self._stock.account(prompt.org).policy
        limits = [one for one in (policy.store_tokens_max, rules.store_tokens_max) if one is not None]
        if not limits:
            return verified
        if self._stock.layout.groups[0].alone:
            return 0
        limit = min(limits)
        return min(verified, limit - limit % prompt.maker.unit_tokens)

    def _not_stored(self, prompt: Prompt, first: int, end: int, reason: Reason) -> None:
        """Remember why columns between these tokens are missed later."""
        ghosts = self._stock.ghosts
        for key in prompt.keys[first // COLUMN_TOKENS : end // COLUMN_TOKENS]:
            if ghosts.reason_of(key) is Reason.NEVER_STORED:
                ghosts.add(key, reason)

    def _take_places_of_window(self, run: _Run, store: Store) -> None:
        """Take slots for the window's end first. What room is left is for the columns before it, since
        other prompts may continue there; those are stored first and displaced first."""
        first = self._stock.layout.groups[run.map.group].first_needed(run.verified)
        window = Store()
        self._take_places(run._replace(first=first), window)
        self._take_places(run._replace(verified=first * COLUMN_TOKENS), store)
        store.add(window.columns, window.slots)

    def _take_places_of_states(self, run: _Run, states: Collection[int], store: Store) -> None:
        """Take slots for the states that the engine has where a column ends: for the last one first,
        since the prompt continues there. Those before it are stored first and displaced first."""
        unit, ends = run.prompt.maker.unit_tokens, list[Store]()
        for end in sorted(states, reverse=True):
            if end <= run.verified and (end % unit == 0 or end == run.verified):
                ends.append(Store())
                first = (end - 1) // COLUMN_TOKENS
                self._take_places(run._replace(first=first, verified=end), ends[-1])
        for one in reversed(ends):
            store.add(one.columns, one.slots)

    def _take_places(self, run: _Run, store: Store) -> int:
        """Take slots for columns that are not stored. Returns how many tokens are stored, or in
        `store`."""
        prefix_map, prompt, _, first, verified, have_from, rules, _, now = run
        stock = self._stock
        whole, rest = divmod(verified, COLUMN_TOKENS)
        policy = prefix_map.account.policy
        born, seen = over(policy, now)
        victims = self._allocator.victims(prefix_map)
        empty, ready, terms = State.EMPTY, State.READY, _terms(run)
        first += (stored := _stored_already(run, born, seen))
        parent = run.found[first - 1] if stored else None
        for depth in range(first, whole + (rest > 0)):
            tokens = rest if depth == whole else COLUMN_TOKENS
            key = prompt.tail(whole, rest) if depth == whole else prompt.keys[depth]
            column = prefix_map.columns.get(key)
            if (
                column is not None
                and column.state is ready
                and not (column.stored_at > born and column.used_at > seen and column.ttl is None)
                and column.expires_at <= now
            ):
                stock.remove(column, Reason.EXPIRED)
                column = prefix_map.columns.get(key)
            if column is None or column.state is empty:
                if depth < have_from:
                    if prefix_map.linked:
                        return depth * COLUMN_TOKENS
                    continue
                if column is None and prefix_map.linked:
                    return self._take_new_places(run, parent, depth, victims, store)
                slot = self._take_over_within_quota(run, depth, tokens)
                if slot is None:
                    slot = self._allocator.take(prefix_map, parent, column, victims, now)
                    if slot is None:
                        return depth * COLUMN_TOKENS
                if column is None and tokens == COLUMN_TOKENS:
                    column = prefix_map.add(key, parent, depth)
                elif column is None:
                    column = prefix_map.add_tail(key, parent, depth, tokens, key_before(prompt, depth))
                stock.occupy(column, slot, State.WRITING, terms)
                store.add([column], [slot])
            else:  # another request stored it: it may do what either allows
                if column.ttl is not None:
                    longer = rules.ttl_seconds is None or rules.ttl_seconds > column.ttl
                    if longer:
                        column.terms = column.terms.but(ttl=rules.ttl_seconds)
                    for listener in stock.listeners:
                        listener.ttl_changed([column])
                if rules.tier2.strictness < column.tier2_rule.strictness:
                    column.terms = column.terms.but(tier2_rule=rules.tier2)
            parent = column
        return verified

    def _take_new_places(
        self, run: _Run, parent: Column | None, first: int, victims: Victims, store: Store
    ) -> int:
        """Take slots for the columns from the depth `first` on, behind this parent. None of them is
        stored, since a column stays for as long as there are some behind it. Returns how many tokens are
        stored, or in `store`."""
        prefix_map, prompt, slots = run.map, run.prompt, list[int]()
        whole, rest = divmod(run.verified, COLUMN_TOKENS)
        most = whole + (rest > 0) - first
        if not parent or parent.ref_count:  # else it has no tail behind it
            slot = self._take_over_within_quota(run, first, rest if first == whole else COLUMN_TOKENS)
            if slot is not None:
                self._stock.grown(prefix_map.account, prefix_map.group, prefix_map.column_bytes)
                slots.append(slot)
        if parent:
            parent.ref_count += 1  # not to be displaced for those behind it
        slots += self._allocator.take_some(prefix_map, most - len(slots), victims, run.now)
        if parent:
            parent.ref_count -= 1
            if not slots:  # else it is about to have a child
                prune(parent)
        keys, terms = prompt.keys[first : min(first + len(slots), whole)], _terms(run)
        columns = prefix_map.add_behind(parent, keys, slots[: len(keys)], terms)
        end = first + len(slots)
        if end > whole:
            key, before = prompt.tail(whole, rest), key_before(prompt, whole)
            parent = columns[-1] if columns else parent
            tail = prefix_map.add_tail(key, parent, whole, rest, before)
            tail.state, tail.slot, tail.terms = State.WRITING, slots[-1], terms
            columns.append(tail)
        store.add(columns, slots)
        return run.verified if len(slots) == most else end * COLUMN_TOKENS

    def _take_over_within_quota(self, run: _Run, depth: int, tokens: int) -> int | None:
        """The slot of a tail that this column continues, as `_take_over` finds it."""
        account = run.map.account
        limit = account.policy.dram_bytes_max
        if limit is not None and account.bytes > limit:
            return None  # it may have been lowered
        return self._take_over(run.map, run.prompt, depth, tokens)

    def _take_over(self, prefix_map: PrefixMap, prompt: Prompt, depth: int, tokens: int) -> int | None:
        """The slot of a shorter tail that this column continues, if nobody is reading or deleting it."""
        if prefix_map.deletes:
            return None
        for tail in tails_of(prefix_map, prompt, depth, tokens - 1):
            if tail.state is State.READY and not tail.ref_count:
                slot = self._stock.vacate(tail)
                self._stock.ghosts.forget([tail.key])  # why it was removed before it was stored again
                parent = tail.parent
                if parent:
                    parent.ref_count += 1  # it is about to have another child
                prune(tail)
                if parent:
                    parent.ref_count -= 1
                return slot
        return None


def _stored_already(run: _Run, born: float, seen: float) -> int:
    """How many columns in a row, from the first one on, are stored and stay as they are. Each of them
    alone is looked at otherwise, as are those behind."""
    found = run.found[: run.verified // COLUMN_TOKENS]
    count = loops.current.fresh(found, run.first, State.READY, born, seen, run.now)
    some = cast("list[Column]", found[run.first : run.first + count])
    for terms in loops.current.runs_of(some, "terms"):
        if terms.ttl is not None or run.rules.tier2.strictness < terms.tier2_rule.strictness:
            return 0
    return count


def _terms(run: _Run) -> Terms:
    """The terms on which the run stores new columns."""
    rules = run.rules
    priority = run.map.account.policy.priority if rules.priority is None else rules.priority
    return terms_of(priority, run.turn, rules.ttl_seconds, rules.tier2)
