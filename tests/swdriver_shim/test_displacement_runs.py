"""Displacement in runs: the same columns go, into the same slots, as if each were chosen by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, product
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from swdriver_shim.cache import column_table
from swdriver_shim.cache.allocator import SlotAllocator
from swdriver_shim.cache.displacement import POLICIES
from swdriver_shim.cache.displacement.competition import Competition
from swdriver_shim.cache.displacement.cost import AGAIN, Cost
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.prefix_map import Account, PrefixMap
from swdriver_shim.cache.prefix_map import Column as LedgerColumn
from swdriver_shim.cache.stock import Stock
from swdriver_shim.cache.victims import Ranking, Victims
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.policy import AS_USUAL, DisplacementName, OrgPolicies, Policy, Rules
from tests.swdriver_shim.forests import Column, Driver, key, may_change, path_to
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.kinds_of_loops import kinds_of_loops, loops_in_use
from tests.swdriver_shim.ledgers import conversation, ledger, store
from tests.swdriver_shim.prompts import FULL, prompt

NAMES = sorted(POLICIES)
DENSE = "default, all columns in its sample"
ORGS = ["acme", "globex", "initech"]
TURNS = st.sampled_from([0, 0, 0, 1, 2, 5])


class Batches(Driver):
    """A driver that stores and displaces as many columns at once as it can."""

    def prompt(
        self, name: str, length: int, now: float, parent: Column | None = None, turn: int = 0
    ) -> list[Column]:
        columns: list[Column] = []
        for depth in range(length):
            needs = parent.needs + 1 if parent else 0
            column = Column(key(f"{name}/{depth}"), parent, now, now, needs=needs, turn=turn)
            self.columns[column.key] = column
            if parent:
                parent.ref_count += 1
            columns.append(column)
            parent = column
        self.policy.stored_all(columns, now)
        return columns

    def displace_some(self, now: float, most: int, taken: int) -> list[Column]:
        """Ask for so many at once, and take so many of them."""
        run = self.policy.victims(now, most)[:taken]
        if run:
            self.policy.displaced(run, now)
            for column in run:
                del self.columns[column.key]
                if column.parent:
                    column.parent.ref_count -= 1
            if (parent := run[-1].parent) and not parent.ref_count and self.has(parent):
                self.policy.leaf(parent)
        return run


class Single(Driver):
    def prompt(
        self, name: str, length: int, now: float, parent: Column | None = None, turn: int = 0
    ) -> list[Column]:
        """All columns have one another before the first is stored, as in a ledger."""
        columns: list[Column] = []
        for depth in range(length):
            needs = parent.needs + 1 if parent else 0
            column = Column(key(f"{name}/{depth}"), parent, now, now, needs=needs, turn=turn)
            if parent:
                parent.ref_count += 1
            columns.append(column)
            parent = column
        for column in columns:
            self.columns[column.key] = column
            self.policy.stored(column, now)
        return columns


class Runs(RuleBasedStateMachine):
    """Two drivers have the same policy and do the same, one of them in batches."""

    names = Bundle("names")

    @initialize(name=st.sampled_from([*NAMES, DENSE]))
    def begin(self, name: str) -> None:
        def policy() -> Any:
            return Competition(1, 1) if name == DENSE else POLICIES[name]()

        self.single, self.batches = Single(policy()), Batches(policy())
        self.pinned: list[bytes] = []
        self.now = 0.0
        self.prompts = 0

    def both(self, name: bytes) -> tuple[Column, Column] | None:
        one, other = self.single.columns.get(name), self.batches.columns.get(name)
        assert (one is None) == (other is None)
        return (one, other) if one and other else None

    @rule(target=names, length=st.integers(1, 12), turn=TURNS)
    def store(self, length: int, turn: int = 0) -> bytes:
        self.prompts += 1
        name = f"prompt {self.prompts}"
        self.single.prompt(name, length, self.now, turn=turn)
        return self.batches.prompt(name, length, self.now, turn=turn)[-1].key

    @rule(target=names, before=names, length=st.integers(1, 12), turn=TURNS, again=st.booleans())
    def store_more(self, before: bytes, length: int, turn: int, again: bool) -> bytes:  # noqa: FBT001
        """Behind a column; `again`: those that were stored behind it once, so that ghosts are met."""
        found = self.both(before)
        self.prompts += not again
        name = f"more {self.prompts} {before.hex()}"
        if found is None or key(f"{name}/0") in self.single.columns:
            return before
        self.single.prompt(name, length, self.now, found[0], turn)
        return self.batches.prompt(name, length, self.now, found[1], turn)[-1].key

    @rule(name=names)
    def use(self, name: bytes) -> None:
        if found := self.both(name):
            self.single.use(path_to(found[0]), self.now)
            self.batches.use(path_to(found[1]), self.now)

    @rule(name=names)
    def pin(self, name: bytes) -> None:
        if found := self.both(name):
            self.pinned.append(name)
            for column in found:
                column.ref_count += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pinned:
            name = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
            self.single.release(self.single.columns[name])
            self.batches.release(self.batches.columns[name])

    @rule(seconds=st.sampled_from([0.001, 0.3, 1.0, 60.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(most=st.integers(1, 15), taken=st.integers(1, 15))
    def displace(self, most: int, taken: int) -> None:
        run = self.batches.displace_some(self.now, most, taken)
        assert len(run) <= most
        same = [self.single.displace(self.now) for _ in run]
        assert [column.key for column in run] == [column.key for column in same if column]
        if not run:
            assert self.single.displace(self.now) is None

    @rule(data=st.data())
    def another_wins(self, data: st.DataObject) -> None:
        one, other = self.single.policy, self.batches.policy
        if may_change(one):
            assert may_change(other)
            at = data.draw(st.integers(0, len(one._miniatures) - 1))
            one._use(one._miniatures[at], self.now)
            other._use(other._miniatures[at], self.now)

    @invariant()
    def all_fits(self) -> None:
        if hasattr(self, "batches"):
            assert self.batches.columns.keys() == self.single.columns.keys()
            check_integrity(self.batches.policy, self.batches.columns.values())

    def teardown(self) -> None:
        """What goes last is the same as well."""
        if hasattr(self, "batches"):
            while self.batches.columns:
                before = len(self.batches.columns)
                self.displace(15, 15)
                if len(self.batches.columns) == before:
                    break


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_run_ends_where_those_that_were_displaced_before_end() -> None:
    """They were stored together, and none of them was hit."""
    driver = Batches(Cost())
    columns = driver.prompt("some", 2, 0.0)
    assert driver.displace_some(1.0, 2, 2) == [columns[1], columns[0]]
    again = driver.prompt("some", 4, 10.0)
    assert driver.displace_some(20.0, 4, 4) == [again[3], again[2]]
    assert driver.displace_some(20.0, 4, 4) == [again[1], again[0]]


def test_who_is_in_front_of_one_that_was_displaced_was_so_too() -> None:
    """Whatever is known of it: a table forgets one of a prompt here and there."""
    driver = Batches(Cost())
    columns = driver.prompt("some", 4, 0.0)
    assert driver.displace_some(1.0, 1, 1) == [columns[3]]
    for column in columns[2::-1]:
        driver.remove(column)
    again = driver.prompt("some", 6, 10.0)
    assert [column.mark for column in again] == [*[AGAIN] * 4, None, None]


def test_what_is_valid_for_a_quarter_of_a_second_is_now_whatever_fractions_add_up_to() -> None:
    """0.3 + 0.25 - 0.3 is more than 0.25, so each victim was chosen anew, not the parent of the last."""
    both = Runs()
    both.begin(name="cost")
    both.store(length=1)
    both.wait(seconds=0.3)
    both.store(length=3)
    both.displace(most=1, taken=1)
    both.teardown()


@pytest.mark.parametrize("name", [*NAMES, DENSE])
def test_a_prompt_goes_in_few_runs(name: str) -> None:
    driver = Batches(Competition(1, 1) if name == DENSE else POLICIES[name]())
    asked = driver.prompt("a", 40, now=1.0)
    gone: list[Column] = []
    runs = 0
    while driver.columns:
        gone += driver.displace_some(2.0, 100, 100)
        runs += 1
    assert gone == asked[::-1]
    assert runs <= 10


def test_the_age_of_each_column_of_a_run_is_learned() -> None:
    """It decides how far back the sample has to reach."""
    single, batches = Single(Competition()), Batches(Competition())
    for driver in (single, batches):
        for number in range(5):
            driver.prompt(f"prompt {number}", 8, now=10.0 * number)
    for _ in range(40):
        single.displace(60.0)
    while batches.columns:
        batches.displace_some(60.0, 100, 100)
    spans = [cast("Any", driver.policy)._returns._span_s for driver in (single, batches)]
    assert spans[0] == pytest.approx(spans[1])
    assert spans[0] > 10


@pytest.mark.parametrize(("name", "before"), [*product(NAMES, NAMES)])
def test_columns_before_a_leaf_may_be_those_of_another_queue(name: str, before: str) -> None:
    """Of a higher priority, whose policy has marked them, and is another one as long as that changes."""
    first, behind = Driver(POLICIES[before]()), Driver(POLICIES[name]())
    path = first.prompt("a", 3, now=1.0)
    for now in (2.0, 3.0):
        first.use(path, now)
    assert first.policy.victim(3.5) is path[-1]  # some mark it only then
    leaf = behind.store("a/3", 4.0, path[-1])
    others = behind.prompt("b", 2, now=4.0)
    run = behind.policy.victims(5.0, 10)
    assert run[0] in {others[-1], leaf}
    for column in reversed(others):
        behind.remove(column)
    assert behind.policy.victims(7.0, 10)[0] is leaf


@pytest.mark.parametrize("name", ["lfu", "slru"])
def test_a_mark_of_cost_is_no_rank_elsewhere(name: str) -> None:
    """Where another priority's columns still have the policy before."""
    first, behind = Driver(Cost()), Driver(POLICIES[name]())
    first.store("a", 0.0)
    first.displace(1.0)
    again = first.store("a", 2.0)
    assert again.mark is AGAIN
    leaf = behind.store("b", 3.0, again)
    assert behind.policy.victims(4.0, 10) == [leaf]


@pytest.mark.parametrize(("name", "value"), [("used_at", 3.0), ("uses", 1), ("terms", 1)])
def test_a_run_ends_at_a_column_of_another_rank_wherever_that_is(name: str, value: object) -> None:
    """Also if only its use is of another time, or its prompt another one of the conversation."""
    for others in range(1, 4):
        driver = Batches(Cost[Column]())
        asked = driver.prompt("a", 4, now=1.0)
        for column in asked[:others]:
            setattr(column, name, value)
            column.turn = column.terms
        assert driver.policy.victims(5.0, 10) == asked[others:][::-1]


@pytest.mark.parametrize("kind", [Single, Batches])
def test_columns_that_are_about_to_be_stored_are_no_hits_of_a_sample_that_begins_anew(
    kind: type[Single | Batches],
) -> None:
    policy = Competition[Column](share=1)
    driver = kind(policy)
    for number in range(150):
        driver.prompt(f"before {number}", 4, now=1.0)
    mask = policy._mask
    while len(driver.columns) > 100:
        driver.displace(2.0)
    driver.prompt("more", 12, now=3.0)
    assert policy._mask < mask
    assert {one.recent for one in policy._miniatures} == {1}, "the column at which it began"
    check_integrity(policy, driver.columns.values())


@pytest.mark.parametrize(("share", "at"), [(1, 1), (1, 20), (1, 40), *((4, at) for at in range(1, 8))])
def test_another_policy_may_win_while_columns_are_stored(
    at: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are stored before come to the one, and those behind to the other."""
    asked = list[int]()
    ask = Competition._ask

    def ask_and_win(policy: Competition[Column], path: Sequence[Column], now: float) -> None:
        ask(policy, path, now)
        asked[-1] += 1
        if asked[-1] == at:
            policy._use(next(one for one in policy._miniatures if one.name == "lru"), now)

    for kind in (Single, Batches):
        driver = kind(Competition(share, share))
        driver.prompt("before", 60, now=1.0)
        driver.displace(2.0)
        asked.append(0)
        with monkeypatch.context() as patched:
            patched.setattr(Competition, "_ask", ask_and_win)
            driver.prompt("more", 40, now=3.0)
        check_integrity(driver.policy, driver.columns.values())
    assert at <= asked[0] == asked[1]


@pytest.mark.parametrize("kind", [*kinds_of_loops()])
@pytest.mark.parametrize("columns", [8, 9, 10])
def test_columns_of_all_pieces_of_a_map_are_listed(
    columns: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And get another policy where the org's is another one."""
    monkeypatch.setattr(column_table, "WHOLE_MAX", 8)
    monkeypatch.setattr(column_table, "PIECE", 3)
    with loops_in_use(kinds_of_loops()[kind]):
        made = ledger(columns)
        slots = store(made, prompt(conversation(*range(columns)), "acme"))
        made.set_policies({"acme": OrgPolicies(policy=Policy(displacement="lru"))}, 1)
        while made.sweep(1):
            pass
        account = made.accounts["acme"]
        [queue] = account._queues[0].values()
        stored = {*account.columns(0)}
        assert queue.name == "lru"
        assert len(queue) == len(stored) == columns
        assert {*chain.from_iterable(queue.columns(0))} == stored
        assert sum(map(len, map(list, queue.columns(0)))) == columns, "each is listed once"
        for bits in (0x0003, 0x0100):
            sampled = {one for one in stored if not int.from_bytes(one.key[:2], "big") & bits}
            assert {*chain.from_iterable(queue.columns(bits))} == sampled != stored
        assert {*store(made, prompt(conversation(*range(columns, 0, -1)), "acme"), 2)} == {*slots}


class OneByOne(SlotAllocator):
    """Chooses each slot by itself."""

    def take_some(self, prefix_map: PrefixMap, most: int, victims: Victims, now: float) -> list[int]:
        taken: list[int] = []
        while (
            len(taken) < most and (slot := self.take(prefix_map, None, None, victims, now)) is not None
        ):
            taken.append(slot)
            self._stock.grown(prefix_map.account, prefix_map.group, prefix_map.column_bytes)
        return taken


class Pair:
    """Two ledgers of which the same is asked."""

    def __init__(self, slots: int, policies: dict[str, Policy]) -> None:
        self.ledgers = [Ledger(FULL, "llama", ghosts_min=20) for _ in range(2)]
        stock, spills = self.ledgers[1]._stock, self.ledgers[1]._spills
        self.ledgers[1]._stores._allocator = OneByOne(stock, spills)
        for made in self.ledgers:
            made.set_slot_limit(0, slots)
            made.set_policies({org: OrgPolicies(policy=of) for org, of in policies.items()}, 0)

    def store(self, org: str, tokens: Sequence[int], now: float, rules: Rules) -> None:
        places = []
        for made in self.ledgers:
            asked = prompt(tokens, org)
            begun = made.begin_store(asked, asked.tokens, now, rules)
            places.append([(column.key, column.depth, slot) for column, slot in begun.places])
            check_integrity(made)
            made.finish_store(begun, now)
        assert places[0] == places[1]

    def match(self, org: str, tokens: Sequence[int], now: float) -> None:
        found = []
        for made in self.ledgers:
            match = made.match(prompt(tokens, org), now)
            made.release(match)
            found.append((match.tokens, match.slots, match.missed, list(match.reasons)))
        assert found[0] == found[1]

    def sweep(self, now: float) -> None:
        for made in self.ledgers:
            made.sweep(now)
            made.reclaim()
            clears = made.take_clears(100)
            made.finish_clears(clears, is_done=True)

    def purge(self, org: str) -> None:
        for made in self.ledgers:
            made.purge(org)

    def check(self) -> None:
        one, other = (seen(made) for made in self.ledgers)
        assert one == other
        for made in self.ledgers:
            check_integrity(made)


def seen(made: Ledger) -> dict[str, Any]:
    """All that a ledger knows of its columns and slots."""

    def of(column: LedgerColumn) -> tuple[object, ...]:
        return column.key, column.slot, column.state, column.due, column.ref_count, column.priority

    return {
        "columns": {org: [*map(of, its.columns(0))] for org, its in made.accounts.items()},
        "bytes": {org: its.group_bytes for org, its in made.accounts.items()},
        "reasons": [list(one.items()) for one in made._stock.ghosts.generations],
        "free": made.pools[0]._free,
        "used": (made.pools[0].used, made.pools[0].ever_used),
        "leftovers": {slot: len(maps) for slot, maps in made.pools[0]._leftovers.items()},
    }


class Anew(Victims):
    """Looks at all orgs for each column."""

    def __init__(self, stock: Stock, group: int, storing: Account | None, more: int) -> None:
        super().__init__(stock.rankings[group], group, storing, more)
        self._others = [
            one for one in stock.accounts.values() if one is not storing and one.group_bytes[group]
        ]

    def run(self, now: float, most: int) -> list[LedgerColumn]:  # noqa: ARG002
        turn = self._turn
        while self._others or turn:
            first = max(self._others, key=self._excess, default=None)
            if turn and (first is None or self._excess(turn) >= self._excess(first)):
                if run := turn.victims(self._group, now):
                    return run
                self._turn = turn = None
            elif first and (run := first.victims(self._group, now)):
                return run
            elif first:
                self._others.remove(first)
        return []


SIZE = FULL.groups[0].column_bytes
POLICY = st.builds(
    Policy,
    displacement=st.sampled_from([*NAMES]),
    share=st.sampled_from([0.5, 1.0, 3.0]),
    priority=st.sampled_from([20, 35]),
    dram_bytes_max=st.sampled_from([None, None, 5 * SIZE, 20 * SIZE]),
    scrub=st.sampled_from([False, False, False, True]),
    ttl_last_use_seconds=st.sampled_from([None, 50]),
)


@settings(max_examples=60)
@given(data=st.data())
def test_ledgers_choose_the_same_at_once_and_one_by_one(data: st.DataObject) -> None:
    policies = {org: data.draw(POLICY) for org in ORGS}
    pair = Pair(data.draw(st.sampled_from([6, 30, 60])), policies)
    dice, now = random.Random(data.draw(st.integers(0, 1 << 32))), 0.0
    for _ in range(40):
        now += dice.choice([0.0, 0.01, 1.0, 30.0])
        org = dice.choice(ORGS)
        kinds = [dice.randint(0, 3), *(dice.randint(0, 9) for _ in range(dice.randint(0, 24)))]
        tokens = conversation(*kinds, rest=dice.choice([0, 0, 7, COLUMN_TOKENS - 1]))
        act = dice.choice(["store", "store", "store", "match", "sweep", "purge", "policy"])
        if act == "store":
            priority = dice.choice([None, None, 10, 90])
            pair.store(org, tokens, now, AS_USUAL if priority is None else Rules(priority=priority))
        elif act == "match":
            pair.match(org, tokens, now)
        elif act == "sweep":
            pair.sweep(now)
        elif act == "purge" and dice.random() < 0.3:
            pair.purge(org)
        elif act == "policy":
            name: DisplacementName = dice.choice(["default", "cost", "lru", "s3fifo", "slru", "lfu"])
            for made in pair.ledgers:
                made.set_displacement(org, name, now)
        pair.check()


@settings(max_examples=60)
@given(data=st.data())
def test_orgs_kept_in_order_give_up_what_they_would_if_all_were_looked_at(data: st.DataObject) -> None:
    """With prompts that are being read, so that some orgs have nothing to give up, shares that change,
    and orgs that come and lose everything."""
    orgs = [f"org-{number}" for number in range(8)]
    policies = {org: data.draw(POLICY) for org in orgs}
    pair = Pair(data.draw(st.sampled_from([12, 40])), policies)
    stock = pair.ledgers[1]._stock

    def victims(group: int, storing: Account | None = None, more: int = 0) -> Victims:
        return Anew(stock, group, storing, more)

    setattr(stock, "victims", victims)  # noqa: B010
    dice, now = random.Random(data.draw(st.integers(0, 1 << 32))), 0.0
    read: list[list[Match]] = []
    for _ in range(60):
        now += dice.choice([0.0, 0.01, 1.0, 30.0])
        org = dice.choice(orgs)
        tokens = conversation(*(dice.randint(0, 3) for _ in range(dice.randint(1, 8))))
        act = dice.choice(["store", "store", "store", "read", "end", "sweep", "purge", "policies"])
        if act == "store":
            pair.store(org, tokens, now, AS_USUAL)
        elif act == "read":
            read.append([made.match(prompt(tokens, org), now) for made in pair.ledgers])
        elif act == "end" and read:
            for made, match in zip(pair.ledgers, read.pop(dice.randrange(len(read))), strict=True):
                made.release(match)
        elif act == "sweep":
            pair.sweep(now)
        elif act == "purge" and dice.random() < 0.3:
            pair.purge(org)
        elif act == "policies":
            policies[org] = data.draw(POLICY)
            for made in pair.ledgers:
                made.set_policies({one: OrgPolicies(policy=of) for one, of in policies.items()}, now)
        pair.check()


class Looks:
    """Counts how often orgs are looked at, to rank them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        rank_of, excess_of = Ranking._rank, Victims._excess

        def rank(ranking: Ranking, account: Account) -> float:
            self.count += 1
            return rank_of(ranking, account)

        def excess(victims: Victims, account: Account, more: int = 0) -> float:
            self.count += 1
            return excess_of(victims, account, more)

        monkeypatch.setattr(Ranking, "_rank", rank)
        monkeypatch.setattr(Victims, "_excess", excess)


def test_a_store_looks_at_few_of_many_orgs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ledger(FULL, "llama")
    made.set_slot_limit(0, 1000)
    for number in range(1000):
        store(made, prompt(conversation(1), f"org-{number}"), float(number))
    looks = Looks(monkeypatch)
    store(made, prompt(conversation(1, 2), "another"), 2000.0)
    looks.count = 0  # of the first store they are all new
    for number in range(10):
        assert len(store(made, prompt(conversation(1, 2), f"more-{number}"), 2001.0)) == 2
    assert looks.count < 200
    check_integrity(made)


def test_the_order_of_orgs_does_not_grow_with_the_stores() -> None:
    """Each store of another org leaves what was known of it behind."""
    made = Ledger(FULL, "llama")
    made.set_slot_limit(0, 40)
    dice = random.Random(1)
    for number in range(2000):
        kinds = [dice.randint(0, 9) for _ in range(dice.randint(1, 6))]
        store(made, prompt(conversation(*kinds), f"org-{dice.randint(0, 9)}"), float(number))
    [ranking] = made._stock.rankings
    assert len(ranking._heap) < 200
    check_integrity(made)


def test_a_share_that_becomes_smaller_counts_from_the_next_store_on() -> None:
    made = Ledger(FULL, "llama")
    made.set_slot_limit(0, 5)
    for org, columns in (("acme", 3), ("globex", 2)):
        store(made, prompt(conversation(*range(columns)), org))
    store(made, prompt(conversation(1), "initech"), 1)
    assert [made.accounts[org].bytes // SIZE for org in ORGS] == [2, 2, 1]
    made.set_policies({"globex": OrgPolicies(policy=Policy(share=1))}, 2)
    store(made, prompt(conversation(2), "initech"), 3)
    assert [made.accounts[org].bytes // SIZE for org in ORGS] == [2, 1, 2]


def test_quotas_are_enforced_without_looking_at_orgs_that_have_none() -> None:
    made = Ledger(FULL, "llama")
    made.set_slot_limit(0, 100)
    limited = Policy(dram_bytes_max=SIZE)
    made.set_policies({"acme": OrgPolicies(policy=limited)}, 0)
    for org in ORGS:
        store(made, prompt(conversation(1, 2, 3), org))
    assert made._stock.limited.keys() == {"acme"}
    made.set_policies({"globex": OrgPolicies(policy=limited)}, 1)
    assert made._stock.limited.keys() == {"globex"}
    made.sweep(2)
    held = {org: account.bytes for org, account in made.accounts.items()}
    assert held == {"acme": SIZE, "globex": SIZE, "initech": 3 * SIZE}


def test_columns_that_are_displaced_together_are_checked_for_expiry_no_more() -> None:
    """The schedule would keep them for an hour."""
    made = ledger(4, acme=Policy(ttl_last_use_seconds=900))
    store(made, prompt(conversation(1, 2, 3, 4)))
    store(made, prompt(conversation(5, 6, 7, 8)), 1)
    parts = chain.from_iterable(made._stock.expiry._due.values())
    due = [column for part in parts for column in part]
    assert {column.key for column in due} == set(prompt(conversation(5, 6, 7, 8)).keys)
    assert len(due) == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_column_behind_which_there_was_no_room_can_be_displaced(name: DisplacementName) -> None:
    """It was held while room was looked for, and is a leaf again."""
    made = ledger(2, acme=Policy(displacement=name))
    store(made, prompt(conversation(1, 2), "acme"))
    assert not store(made, prompt(conversation(1, 2, 3), "acme"), 1)
    assert len(store(made, prompt(conversation(7, 8), "acme"), 2)) == 2
    check_integrity(made)
