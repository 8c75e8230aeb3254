"""The ledger against a model that knows every slot's contents, whatever happens in whatever order.

A miss is always legal. What never is: a column of another org, of other tokens, expired, purged, half
written, or not the one in its slot; a slot with two owners; a quota that is exceeded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from swdriver_shim.cache import spills
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.cache.reasons import Reason, Removal
from swdriver_shim.cache.recalls import Recall
from swdriver_shim.cache.slots import USE_SECONDS_MAX, Clear, Use
from swdriver_shim.cache.spills import Dates, Spill
from swdriver_shim.cache.stores import Store
from swdriver_shim.cache.tier2_deletes import TierDelete
from swdriver_shim.keys import COLUMN_TOKENS, Namespace, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, DisplacementName, OrgPolicies, Policy, Rules, Tier2Rule, Tiers
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.kinds_of_loops import kinds_of_loops, loops_in_use
from tests.swdriver_shim.prompts import (
    FULL,
    HYBRID,
    NAMESPACE,
    OTHER,
    PURE,
    STATES,
    prompt,
)

Slot = tuple[int, int]  # group and number

SECONDS = st.one_of(st.none(), st.integers(1, 40))
DISPLACEMENT: list[DisplacementName] = ["default", "lru", "lfu", "slru", "s3fifo", "arc", "cost"]
POLICIES = st.builds(
    Policy,
    ttl_first_use_seconds=SECONDS,
    ttl_last_use_seconds=SECONDS,
    tiers=st.sampled_from([*Tiers, *[Tiers.TIER2] * 6]),
    dram_bytes_max=st.sampled_from([None, None, 0, 100_000, 30_000]),
    share=st.integers(1, 3),
    priority=st.integers(30, 31),
    displacement=st.sampled_from(DISPLACEMENT),
    scrub=st.booleans(),
    store_tokens_max=st.sampled_from([None, None, None, None, 0, 70, 128]),
    redundant_from_priority=st.sampled_from([None, 0, 31]),
)
RULES = st.builds(
    Rules,
    no_store=st.sampled_from([False, False, False, True]),
    store_tokens_max=st.sampled_from([None, None, None, 64, 130]),
    tier2=st.sampled_from(Tier2Rule),
    ttl_seconds=SECONDS,
    priority=st.sampled_from([None, 0, 100]),
)
FIRST: st.SearchStrategy[list[int]] = st.one_of(
    st.just([]), st.lists(st.integers(0, 200), min_size=3, max_size=3)
)
# After how many tokens an engine has a state; after all of them as well, if the first is true.
HAS_STATES = st.tuples(st.booleans(), st.sets(st.sampled_from([1, 64, 65, 104, 128, 192, 256, 320])))
ORGS = st.sampled_from(["acme", "globex", "initech"])
LOOPS = st.deferred(lambda: st.sampled_from([*kinds_of_loops()]))
NAMESPACES = st.sampled_from([NAMESPACE, NAMESPACE, NAMESPACE, OTHER])


def make(org: str, columns: Sequence[int], rest: int, namespace: Namespace) -> Prompt:
    """Of few kinds of columns, so that prompts share prefixes, and tails are grown into columns."""
    tokens = [kind for kind in columns for _ in range(COLUMN_TOKENS)]
    return prompt([*tokens, *[1] * rest], org, namespace)


PROMPTS = st.builds(
    make,
    ORGS,
    st.lists(st.integers(0, 1), max_size=5),
    st.sampled_from([0, 0, 1, 40, 63]),
    NAMESPACES,
)


@dataclass(eq=False)
class Held:
    """What lies in a slot, as whoever wrote it knows."""

    org: str
    namespace: Namespace
    key: bytes
    stored_at: float
    purged: bool = False


Name = tuple[int, bytes]  # of a column: its group and key


class LedgerMachine(RuleBasedStateMachine):
    layout: Layout
    matches: Bundle[Match] = Bundle("matches")
    stores: Bundle[Store] = Bundle("stores")
    spills: Bundle[Spill] = Bundle("spills")
    recalls: Bundle[Recall] = Bundle("recalls")
    forgets: Bundle[list[TierDelete]] = Bundle("forgets")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.layout, "llama", ghosts_min=10)
        self.now = 100.0
        self.policies: dict[str, OrgPolicies] = {}
        self.memory: dict[Slot, Held] = {}
        self.lost: set[Slot] = set()  # with an agent; what the driver has there may not be noticed yet
        self.used_at: dict[tuple[int, bytes], float] = {}
        self.reading: dict[Match, dict[Slot, Held]] = {}
        self.writing: dict[Use, list[Slot]] = {}
        self.copying: dict[Spill, dict[Slot, Held]] = {}
        self.disk: dict[Name, tuple[Held, Dates]] = {}
        self.taken: list[list[TierDelete]] = []
        self.began: dict[Use, float] = {}
        self.prompts: dict[Store, Prompt] = {}
        self.clears: list[Clear] = []
        self.purges: list[tuple[Removal, list[Held]]] = []
        self.asked: dict[str, int] = {}
        self.loops = contextlib.ExitStack()
        for group in range(len(self.layout.groups)):
            self.ledger.set_slot_limit(group, 7)
        roomy = Policy(tiers=Tiers.TIER2, ttl_last_use_seconds=None)
        self.set_policies({org: OrgPolicies(policy=roomy) for org in ("acme", "globex", "initech")})

    @initialize(kind=LOOPS)
    def use_loops(self, kind: str) -> None:
        self.loops.enter_context(loops_in_use(kinds_of_loops()[kind]))

    def policy(self, org: str) -> Policy:
        return self.policies.get(org, OrgPolicies()).policy

    # Requests

    @rule(target=matches, asked=PROMPTS)
    def match(self, asked: Prompt) -> Match:
        return self.matched(asked)

    def matched(self, asked: Prompt) -> Match:
        expected = self.ledger.query(asked, self.now)
        found = self.ledger.match(asked, self.now)
        assert found.tokens == expected <= asked.tokens
        self.asked[asked.org] = self.asked.get(asked.org, 0) + asked.tokens
        whole, rest = divmod(found.tokens, COLUMN_TOKENS)
        read = self.reading[found] = {}
        self.began[found] = self.now
        for group, hit in enumerate(found.columns):
            needed = asked.keys[self.layout.groups[group].first_needed(found.tokens) : whole]
            needed += [asked.tail(whole, rest)] if rest else []
            assert [column.key for column in hit] == needed
            if self.layout.groups[group].is_state:
                assert len(hit) == (found.tokens > 0), "the last state is needed, and no other"
            for column in hit:
                if (group, column.slot) not in self.memory:
                    assert (group, column.slot) in self.lost, "nothing lies there"
                    self.ledger.refuse(column, Reason.SEAL_REFUSED)  # as a refill would
                    continue
                read[group, column.slot] = self.legal(asked, group, column)
                self.used_at[group, column.key] = self.now
        return found

    def legal(self, asked: Prompt, group: int, column: Column) -> Held:
        held = self.memory[group, column.slot]
        policy = self.policy(asked.org)
        used_at = self.used_at[group, column.key]
        assert (held.org, held.key) == (asked.org, column.key), "another column lies there"
        assert held.namespace == asked.maker.namespace
        assert not held.purged
        assert policy.tiers is not Tiers.NONE
        assert policy.expires_at(held.stored_at, used_at, column.ttl) > self.now, "it has expired"
        return held

    @rule(found=consumes(matches))
    def release(self, found: Match) -> None:
        self.ledger.release(found)
        self.ledger.release(found)  # as often as one likes
        self.reading.pop(found, None)

    @rule(found=matches, columns=st.integers(0, 5))
    def shorten(self, found: Match, columns: int) -> None:
        self.ledger.shorten(found, min(found.tokens, columns * COLUMN_TOKENS), Reason.SEAL_REFUSED)

    @rule(found=matches, data=st.data())
    def refuse(self, found: Match, data: st.DataObject) -> None:
        hit = [column for columns in found.columns for column in columns]
        if hit:
            self.ledger.refuse(data.draw(st.sampled_from(hit)), Reason.SEAL_REFUSED)

    @rule(
        target=stores,
        asked=PROMPTS,
        verified=st.integers(0, 400),
        rules=RULES,
        have_from=FIRST,
        has_states=HAS_STATES,
    )
    def begin_store(
        self,
        asked: Prompt,
        verified: int,
        rules: Rules,
        have_from: Sequence[int],
        has_states: tuple[bool, set[int]],
    ) -> Store:
        return self.stored(asked, verified, rules, have_from[: len(self.layout.groups)], has_states)

    def stored(
        self,
        asked: Prompt,
        verified: int,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        has_states: tuple[bool, set[int]] = (True, set()),
    ) -> Store:
        verified = min(verified, asked.tokens)
        states = {one for one in has_states[1] if one <= verified}
        states |= {verified} if has_states[0] and verified else set()
        store = self.ledger.begin_store(asked, verified, self.now, rules, first, states)
        for column, _ in store.places:
            if self.layout.groups[column.group].is_state:
                assert column.depth * COLUMN_TOKENS + column.tokens in states, "there is no such state"
            else:
                assert not first or column.depth * COLUMN_TOKENS >= first[column.group]
        slots = self.writing[store] = [(column.group, slot) for column, slot in store.places]
        self.began[store] = self.now
        self.prompts[store] = asked
        for group, slot in slots:
            assert slot < self.ledger.pools[group].limit
            self.memory.pop((group, slot), None)
        policy = self.policy(asked.org)
        if store.places:
            limit = policy.dram_bytes_max
            assert limit is None or self.ledger.accounts[asked.org].bytes <= limit
            assert not rules.no_store
            for limit in (rules.store_tokens_max, policy.store_tokens_max):
                for column, _ in store.places:
                    end = column.depth * COLUMN_TOKENS + column.tokens
                    assert limit is None or end <= limit
            assert policy.tiers is not Tiers.NONE
        return store

    @rule(store=consumes(stores), fails=st.sampled_from([False, False, True]))
    def finish_store(self, store: Store, *, fails: bool) -> None:
        failed = [column for column, _ in store.places[1:]] if fails else []
        if self.writing.pop(store, None) is not None:
            for column, slot in store.places:
                if column not in failed:
                    home, asked = column.map, self.prompts[store]
                    space = asked.maker.namespace
                    self.memory[home.group, slot] = Held(asked.org, space, column.key, self.now)
                    self.used_at[home.group, column.key] = self.now
        self.ledger.finish_store(store, self.now, dict.fromkeys(failed, Reason.AGENT_LOST))

    # Verbs

    @rule(asked=PROMPTS, shared=st.booleans())
    def delete(self, asked: Prompt, *, shared: bool) -> None:
        removal = self.ledger.delete(asked, shared=shared)
        if shared:
            assert not self.ledger.query(asked, self.now)
            kept = [held for (_, key), (held, _) in self.disk.items() if key in asked.keys]
            if self.policy(asked.org).tiers is Tiers.TIER2:
                self.purges.append((removal, kept))
        assert removal.done or removal.columns or removal.pending

    @rule(asked=PROMPTS, priority=st.sampled_from([0, 35, 100]))
    def set_priority(self, asked: Prompt, priority: int) -> None:
        self.ledger.set_priority(asked, priority, self.now)

    @rule(asked=PROMPTS, seconds=st.integers(1, 20))
    def set_ttl(self, asked: Prompt, seconds: int) -> None:
        self.ledger.set_ttl(asked, seconds)

    @rule(org=ORGS, namespace=st.one_of(st.none(), NAMESPACES))
    def purge(self, org: str, namespace: Namespace | None) -> None:
        gone = [
            held
            for held in [*self.memory.values(), *(held for held, _ in self.disk.values())]
            if held.org == org and (namespace is None or held.namespace == namespace)
        ]
        self.purges.append((self.ledger.purge(org, namespace), gone))
        for held in gone:
            held.purged = True

    @rule(org=ORGS, policy=POLICIES)
    def set_policy(self, org: str, policy: Policy) -> None:
        self.set_policies({**self.policies, org: OrgPolicies(policy=policy)})

    @rule(org=ORGS, name=st.sampled_from(DISPLACEMENT))
    def set_displacement(self, org: str, name: DisplacementName) -> None:
        before = self.policies.get(org, OrgPolicies())
        policy = structs.replace(before.policy, displacement=name)
        self.policies = {**self.policies, org: structs.replace(before, policy=policy)}
        self.ledger.set_displacement(org, name, self.now)

    def set_policies(self, policies: dict[str, OrgPolicies]) -> None:
        self.policies = policies
        self.ledger.set_policies(policies, self.now)

    @rule(data=st.data(), slots=st.integers(0, 9))
    def set_slot_limit(self, data: st.DataObject, slots: int) -> None:
        self.set_group_line(data.draw(st.integers(0, len(self.layout.groups) - 1)), slots)

    def set_group_line(self, group: int, slots: int) -> None:
        for slot in [one for one in self.memory if one[0] == group and one[1] >= slots]:
            del self.memory[slot]
        self.ledger.set_slot_limit(group, slots)

    @rule(asked=PROMPTS)
    def explain(self, asked: Prompt) -> None:
        told = self.ledger.explain(asked, self.now)
        hit = self.ledger.query(asked, self.now) // COLUMN_TOKENS
        for group in self.layout.groups:
            states = [column.state for column in told[group.name]]
            if group.linked:
                assert states[:hit] == ["ready"] * hit
            if group.is_state and hit and not self.ledger.query(asked, self.now) % COLUMN_TOKENS:
                assert states[hit - 1] == "ready"
            assert set(states) <= {"ready", *Reason}

    # Time and long work

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 7.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        while self.ledger.sweep(self.now, 3):
            pass
        for use in [one for one, began in self.began.items() if began + USE_SECONDS_MAX <= self.now]:
            uses: Any
            for uses in (self.reading, self.writing, self.copying):
                uses.pop(use, None)
        for account in self.ledger.accounts.values():
            for group, queues in enumerate(account._queues):
                assert all(one.name == account.policy.displacement for one in queues.values())
                for column in account.columns(group):
                    if column.state is State.READY:
                        policy = account.policy
                        until = policy.expires_at(column.stored_at, column.used_at, column.ttl)
                        assert until > self.now - 1
        assert self.ledger.overstay.columns == 0 or self.ledger.overstay.seconds_max >= 0

    @rule()
    def reclaim(self) -> None:
        while self.ledger.reclaim(3):
            pass

    @rule(most=st.integers(1, 4))
    def take_clears(self, most: int) -> None:
        self.clears += self.ledger.take_clears(most)

    @rule(works=st.sampled_from([True, True, False]))
    def clear(self, *, works: bool) -> None:
        if not works:
            self.ledger.finish_clears(self.clears, is_done=False)
        else:
            for clear in self.clears:
                assert not any((clear.group, clear.slot) in slots for slots in self.writing.values())
                self.memory.pop((clear.group, clear.slot), None)
            self.ledger.finish_clears(self.clears, is_done=True)
        self.clears = []

    # Tier 2

    @rule(target=spills)
    def begin_spill(self) -> Any:
        spill = self.spilled()
        return spill or multiple()

    def spilled(self) -> Spill | None:
        spill = self.ledger.tier2.begin_spill(self.now, 3)
        if spill is None:
            return None
        slots = self.copying[spill] = {}
        self.began[spill] = self.now
        for one in spill.copies:
            held = self.memory.get((one.group, one.slot))
            if held is None:
                assert (one.group, one.slot) in self.lost, "nothing lies there"
                continue
            slots[one.group, one.slot] = held
            assert (held.key, prompt([], held.org).maker.tag) == (one.key, one.tag)
            policy = self.policy(held.org)
            assert policy.tiers is Tiers.TIER2
            if policy.redundant_from_priority != 31:  # some of its columns
                assert one.redundant is (policy.redundant_from_priority == 0)
            assert not held.purged
            if one.again:
                self.disk.pop((one.group, one.key), None)
        return spill

    @rule(spill=consumes(spills), data=st.data())
    def finish_spill(self, spill: Spill, data: st.DataObject) -> None:
        slots = self.copying.pop(spill, {})
        kept = [
            self.memory.get((one.group, one.slot)) is slots.get((one.group, one.slot), 0)
            and data.draw(st.sampled_from([True, True, True, False]))
            for one in spill.copies
        ]
        for one, is_kept in zip(spill.copies, kept, strict=True):
            if is_kept:
                held = slots[one.group, one.slot]
                self.disk.setdefault((one.group, one.key), (held, one.dates))
        self.ledger.tier2.finish_spill(spill, kept)

    @rule(asked=PROMPTS, data=st.data())
    def keep(self, asked: Prompt, data: st.DataObject) -> None:
        """All the way: stored, asked for, copied."""
        self.finish_store(self.stored(asked, asked.tokens), fails=False)
        self.release(self.matched(asked))
        spill = self.spilled()
        if spill:
            self.finish_spill(spill, data)

    @rule(asked=PROMPTS, is_gone=st.booleans(), data=st.data())
    def bring(self, asked: Prompt, data: st.DataObject, *, is_gone: bool) -> None:
        """And back."""
        if is_gone:
            self.keep(asked, data)
        for slots in (0, 7) if is_gone else ():
            for group in range(len(self.layout.groups)):
                self.set_group_line(group, slots)
        first = self.matched(asked)
        for recall in self.look_up(asked):
            self.finish_recall(recall, data)
        found = self.ledger.rematch(first, self.now, first.tokens)
        del self.reading[first]
        self.began.pop(first)
        self.ledger.release(found)
        assert found.tokens >= min(first.tokens, found.tokens)
        self.used_at |= {
            (column.group, column.key): column.used_at for hit in found.columns for column in hit
        }

    @rule(target=recalls, asked=PROMPTS)
    def search(self, asked: Prompt) -> Any:
        return multiple(*self.look_up(asked))

    def look_up(self, asked: Prompt) -> list[Recall]:
        before = self.ledger.query(asked, self.now)
        search = self.ledger.tier2.search(asked, before // COLUMN_TOKENS, self.now)
        if search is None:
            return []
        there: list[set[int]] = []
        try:
            question = next(search)
            while True:
                answer = {
                    group: {one for one in depths if (group, asked.keys[one]) in self.disk}
                    for group, depths in question.items()
                }
                question = search.send(answer)
        except StopIteration as ended:
            there = ended.value
        recalls = self.ledger.tier2.begin_recalls(asked, there, self.now)
        for recall in recalls:
            assert self.policy(asked.org).tiers is Tiers.TIER2
            assert self.ledger.tier2.start_recall(recall, self.now)
            self.begin_recall(recall)
        return recalls

    def begin_recall(self, recall: Recall) -> None:
        self.writing[recall] = [(column.group, slot) for column, slot in recall.places]
        self.began[recall] = self.now
        for slot in self.writing[recall]:
            self.memory.pop(slot, None)

    @rule(recall=consumes(recalls), data=st.data())
    def finish_recall(self, recall: Recall, data: st.DataObject) -> None:
        found: dict[Column, Dates | Reason] = {}
        is_given_up = self.writing.pop(recall, None) is None
        for column, slot in recall.places:
            name = column.group, column.key
            if name not in self.disk or is_given_up:
                found[column] = Reason.DISPLACED
            elif data.draw(st.sampled_from([True, True, True, False])):
                held, dates = self.disk[name]
                found[column] = dates
                self.memory[column.group, slot] = held
                if recall.shards is None and column.state is State.RECALLING and column.slot == slot:
                    self.used_at[name] = dates.used_at
        self.ledger.tier2.finish_recall(recall, self.now, found)

    @rule(data=st.data())
    def lose_an_agent(self, data: st.DataObject) -> None:
        """Its memory comes back empty."""
        group = data.draw(st.integers(0, len(self.layout.groups) - 1))
        if any(slot[0] == group for slots in self.writing.values() for slot in slots):
            return
        self.lost |= {slot for slot in self.memory if slot[0] == group}
        self.memory = {slot: held for slot, held in self.memory.items() if slot[0] != group}
        self.ledger.lose(group, frozenset({0}))
        self.reclaim()

    @rule(target=recalls)
    def restore(self) -> Any:
        recall = self.ledger.tier2.begin_restore(3)
        if recall is None:
            return multiple()
        self.ledger.tier2.start_recall(recall, self.now)
        self.begin_recall(recall)
        return recall

    @rule(target=forgets)
    def take_forgets(self) -> list[TierDelete]:
        self.taken.append(self.ledger.tier2.take_deletes(2))
        return self.taken[-1]

    @rule(taken=consumes(forgets), works=st.sampled_from([True, True, False]))
    def forget(self, taken: list[TierDelete], *, works: bool) -> None:
        self.taken = [one for one in self.taken if one is not taken]
        if works:
            for one in taken:
                self.disk.pop((one.group, one.key), None)
            self.ledger.tier2.finish_deletes(taken, is_done=True)
        else:
            self.ledger.tier2.finish_deletes(taken, is_done=False)

    @rule(works=st.sampled_from([True, True, False]))
    def purge_disk(self, *, works: bool) -> None:
        purge = self.ledger.tier2.take_purge()
        if purge and works:
            org = purge.account.org
            self.disk = {name: kept for name, kept in self.disk.items() if kept[0].org != org}
            self.ledger.tier2.finish_purge(purge, is_done=True)
        elif purge:
            self.ledger.tier2.finish_purge(purge, is_done=False)

    # What always holds

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        check_integrity(self.ledger)

    @invariant()
    def what_is_read_stays_as_it_is(self) -> None:
        for slots in [*self.reading.values(), *self.copying.values()]:
            for slot, held in slots.items():
                lines = slot[1] < self.ledger.pools[slot[0]].limit
                assert not lines or self.memory.get(slot) in (held, None), "overwritten while it is read"

    @invariant()
    def every_token_is_accounted_for(self) -> None:
        for org, asked in self.asked.items():
            tally = self.ledger.tally(org)
            assert tally.requested == asked == tally.hits.total() + tally.missed.total()

    @invariant()
    def a_purge_that_is_done_has_left_nothing(self) -> None:
        for removal, gone in self.purges:
            if removal.done:
                assert not any(held in self.memory.values() for held in gone)
                assert not any(held in gone for held, _ in self.disk.values())

    def teardown(self) -> None:
        with self.loops:
            self.end()

    def end(self) -> None:
        for found in list(self.reading):
            self.release(found)
        for store in [use for use in self.writing if isinstance(use, Store)]:
            self.finish_store(store, fails=False)
        for spill in list(self.copying):
            del self.copying[spill]
            self.ledger.tier2.finish_spill(spill, [])
        for recall in [use for use in self.writing if isinstance(use, Recall)]:
            del self.writing[recall]
            self.ledger.tier2.finish_recall(recall, self.now, {})
        for org in list(self.ledger.accounts):
            self.purge(org, None)
        self.reclaim()
        while self.ledger.tier2.begin_restore(10):
            raise AssertionError("of what is purged nothing is restored")
        for taken in self.taken:
            self.forget(taken, works=True)
        while taken := self.ledger.tier2.take_deletes(100):
            self.forget(taken, works=True)
        while purge := self.ledger.tier2.take_purge():
            self.ledger.tier2.finish_purge(purge, is_done=False)
            self.purge_disk(works=True)
        while True:
            self.clear(works=True)
            self.take_clears(100)
            if not self.clears:
                break
        assert all(removal.done for removal, _ in self.purges)
        assert not any(account.bytes for account in self.ledger.accounts.values())
        assert not any(pool.used for pool in self.ledger.pools)
        self.nothing_contradicts_itself()


def machine(layout: Layout) -> type[LedgerMachine]:
    return type("Machine", (LedgerMachine,), {"layout": layout})


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [FULL, HYBRID, STATES, PURE], ids=["full", "hybrid", "states", "pure"]
)
def test_whatever_happens_only_what_may_be_served_is_served(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills, "RESERVE_PART", 3)
    run = settings(
        max_examples=100,
        stateful_step_count=50,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
    run_state_machine_as_test(machine(layout), settings=run)
