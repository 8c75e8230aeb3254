"""Displacement: whatever is asked in whatever order, a policy names a live leaf that nothing holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from swdriver_shim.cache.displacement import (
    DEFAULT,
    POLICIES,
    Changeover,
    DisplacementPolicy,
    cost,
    leaves,
)
from swdriver_shim.cache.displacement import returns as learning
from swdriver_shim.cache.displacement.changeover import MOVED
from swdriver_shim.cache.displacement.competition import (
    COMPETING,
    OBSERVED,
    SAMPLE_COLUMNS,
    Choice,
    Competition,
    Miniature,
    Standing,
)
from swdriver_shim.cache.displacement.cost import _SLACK, AGAIN, Cost, keys_and_kinds, kind_of
from swdriver_shim.cache.displacement.gone import Gone
from swdriver_shim.cache.displacement.leaves import Leaves
from swdriver_shim.cache.displacement.lru import Lfu, Lru
from swdriver_shim.cache.displacement.returns import AGES, SAMPLE_MAX, TOGETHER_MAX, Returns, age_of
from tests.swdriver_shim.forests import Column, Driver, key, may_change, path_to
from tests.swdriver_shim.integrity import check_integrity

NAMES = sorted(POLICIES)
DENSE = "default, all columns in its sample"


class Forest(RuleBasedStateMachine):
    """Every policy, under everything that a driver may do to it, against a set of columns."""

    columns = Bundle("columns")

    @initialize(name=st.sampled_from([*NAMES, DENSE]))
    def begin(self, name: str) -> None:
        self.driver = Driver(Competition(1, 1) if name == DENSE else POLICIES[name]())
        self.pinned: list[Column] = []
        self.now = 0.0
        self.names = 0

    @rule(target=columns, parent=st.none() | columns, tail=st.booleans())
    def store(self, parent: Column | None, tail: bool) -> Column:  # noqa: FBT001
        if parent and not self.driver.has(parent):
            parent = None
        self.names += 1
        return self.driver.store(f"column {self.names}", self.now, parent, tail=tail)

    @rule(target=columns, column=columns)
    def store_again(self, column: Column) -> Column:
        """After it has been displaced, so that ghosts are met."""
        parent = column.parent
        if column.key in self.driver.columns or (parent and not self.driver.has(parent)):
            return column
        again = Column(column.key, parent, self.now, self.now, needs=column.needs, tail=column.tail)
        self.driver.columns[again.key] = again
        if parent:
            parent.ref_count += 1
        self.driver.policy.stored(again, self.now)
        return again

    @rule(column=columns)
    def use(self, column: Column) -> None:
        path = path_to(column)
        if all(map(self.driver.has, path)):
            self.driver.use(path, self.now)

    @rule(column=columns)
    def pin(self, column: Column) -> None:
        if self.driver.has(column):
            column.ref_count += 1
            self.pinned.append(column)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.pinned) - 1))
        self.driver.release(self.pinned.pop(at))

    @rule(seconds=st.sampled_from([0.001, 0.3, 1.0, 60.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(times=st.integers(1, 12))
    def displace(self, times: int) -> None:
        for _ in range(times):
            leaves = self.driver.leaves()
            column = self.driver.policy.victim(self.now)
            assert column in leaves if leaves else column is None
            assert self.driver.policy.victim(self.now) is column, "it stays until it is removed"
            assert self.driver.displace(self.now) is column

    @rule(column=columns)
    def purge(self, column: Column) -> None:
        """With all that is below, parents first: any order has to do."""
        gone = [one for one in self.driver.columns.values() if column in path_to(one)]
        assert bool(gone) == self.driver.has(column)
        self.pinned = [one for one in self.pinned if one not in gone]
        for one in gone:
            del self.driver.columns[one.key]
            self.driver.policy.removed(one)
        if gone and column.parent:
            self.driver.release(column.parent)

    @rule(name=st.sampled_from(NAMES))
    def change_policy(self, name: str) -> None:
        """One change at a time, whatever changes within the policies meanwhile."""
        if self.driver.columns and not isinstance(self.driver.policy, Changeover):
            self.driver.change_policy(POLICIES[name]())

    @rule(columns=st.integers(1, 30))
    def move(self, columns: int) -> None:
        if isinstance(self.driver.policy, Changeover):
            self.driver.policy.move(columns, self.now)

    @rule(data=st.data())
    def another_wins(self, data: st.DataObject) -> None:
        """Whichever it is, and whether the columns have been moved to the one before or not."""
        policy = self.driver.policy
        if isinstance(policy, Changeover):
            policy = policy.to
        if may_change(policy):
            policy._use(data.draw(st.sampled_from(policy._miniatures)), self.now)

    @invariant()
    def all_fits(self) -> None:
        if hasattr(self, "driver"):
            assert len(self.driver.policy) == len(self.driver.columns)
            check_integrity(self.driver.policy, self.driver.columns.values())

    def teardown(self) -> None:
        """Nothing is left that nobody would ever displace."""
        if hasattr(self, "driver"):
            for column in self.pinned:
                self.driver.release(column)
            while self.driver.displace(self.now):
                pass
            assert not self.driver.columns


class Exactly(RuleBasedStateMachine):
    """LRU is what everybody means by it: the leaf used longest ago, the deeper of two."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(Lru())
        self.now = 0.0

    @rule(prompt=st.integers(0, 5), length=st.integers(1, 6), seconds=st.sampled_from([0.0, 1.0]))
    def ask(self, prompt: int, length: int, seconds: float) -> None:
        self.now += seconds
        path: list[Column] = []
        names = [
            f"{prompt // 2}/{depth}" if depth < 2 else f"{prompt}/{depth}" for depth in range(length)
        ]
        for name in names:
            if key(name) not in self.driver.columns:
                break
            path.append(self.driver.columns[key(name)])
        if path:
            self.driver.use(path, self.now)
        for name in names[len(path) :]:
            path.append(self.driver.store(name, self.now, path[-1] if path else None))

    @rule()
    def displace(self) -> None:
        oldest = min(((column.used_at, -column.needs) for column in self.driver.leaves()), default=None)
        column = self.driver.displace(self.now)
        assert (column and (column.used_at, -column.needs)) == oldest


TestForest = pytest.mark.slow(Forest.TestCase)
TestForest.settings = settings(max_examples=60, stateful_step_count=60)
TestExactly = Exactly.TestCase
TestExactly.settings = settings(max_examples=40)


@pytest.fixture(params=NAMES)
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(POLICIES[request.param]())


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT in POLICIES
    assert {name: make().name for name, make in POLICIES.items()} == {name: name for name in POLICIES}


def test_a_prompt_goes_from_its_end(driver: Driver) -> None:
    prompt = driver.prompt("a", 20, now=1.0)
    assert [driver.displace(2.0) for _ in range(21)] == [*reversed(prompt), None]


def test_the_same_questions_have_the_same_answers() -> None:
    def run(make: Callable[[], DisplacementPolicy[Any]]) -> list[bytes]:
        driver, dice, gone = Driver(make()), random.Random(7), []
        for second in range(400):
            if second % 3 or not driver.columns:
                driver.prompt(f"p{second}", dice.randint(1, 6), float(second))
            else:
                driver.use(path_to(dice.choice(list(driver.columns.values()))), float(second))
            while len(driver.columns) > 100:
                victim = driver.displace(float(second))
                assert victim
                gone.append(victim.key)
        return gone

    for make in POLICIES.values():
        assert run(make) == run(make)


@pytest.mark.parametrize("name", ["lfu", "slru", "s3fifo"])
def test_what_was_used_outlives_one_off_prompts(name: str) -> None:
    """A scan of prompts that nobody asks again does not drive out one that is asked now and then."""
    driver = Driver(POLICIES[name]())
    asked = driver.prompt("asked", 4, now=0.0)
    driver.use(asked, 1.0)
    driver.use(asked, 2.0)
    for number in range(30):
        driver.prompt(f"scan {number}", 4, now=3.0 + number)
        while len(driver.columns) > 24:
            driver.displace(3.0 + number)
    assert all(column.key in driver.columns for column in asked)


def test_lfu_lets_go_of_what_was_popular_once() -> None:
    driver = Driver(POLICIES["lfu"]())
    popular = driver.prompt("popular", 1, now=0.0)
    for second in range(5):
        driver.use(popular, float(second))
    now = 10.0
    for number in range(40):  # each newcomer is used twice, then another comes
        newcomer = driver.prompt(f"new {number}", 1, now)
        driver.use(newcomer, now)
        driver.use(newcomer, now)
        while len(driver.columns) > 2:
            driver.displace(now)
        now += 1
    assert popular[0].key not in driver.columns


def test_slru_gives_up_protection_beyond_its_share() -> None:
    driver = Driver(POLICIES["slru"]())
    prompts = [driver.prompt(f"p{number}", 2, float(number)) for number in range(10)]
    for number, prompt in enumerate(prompts):
        driver.use(prompt, 20.0 + number)
    driver.prompt("new", 2, 40.0)
    gone = [driver.displace(41.0) for _ in range(6)]
    assert {column.key for column in gone if column} >= {key("new/0"), key("new/1"), key("p0/1")}


def test_s3fifo_knows_who_was_here() -> None:
    driver = Driver(POLICIES["s3fifo"]())
    for number in range(10):
        driver.store(f"p{number}", float(number))
    driver.displace(20.0)
    driver.store("p0", 21.0)
    gone = [driver.displace(22.0) for _ in range(9)]
    assert key("p0") not in {column.key for column in gone if column}


def test_a_thousand_drops_leave_no_thousand_entries() -> None:
    queue = Leaves[Column](lambda column: column.used_at)
    kept = Column(key("kept"), used_at=-1.0)
    queue.put(kept)
    for number in range(1000):
        column = Column(key(str(number)), used_at=float(number))
        queue.put(column)
        queue.drop(column)
    assert len(queue._heap) < 200
    assert queue.first() is kept


def test_what_is_removed_from_the_front_leaves_nothing_to_go_through_before_the_next_victim() -> None:
    """As columns do that expire in the order in which they came."""
    policy = Cost[Column]()
    driver = Driver(policy)
    columns = [driver.store(f"p{number}", float(number)) for number in range(1000)]
    for column in columns[:400]:
        driver.remove(column)
    [oldest, _] = policy._kinds[0]
    assert [entry[3] for entry in sorted(oldest)] == columns[400:]


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_gone_through_a_few_at_a_time_and_the_same_columns_go(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million in one step, nothing else would be done for most of a second."""

    def gone(seed: int) -> list[bytes]:
        driver, dice, keys = Driver(POLICIES[name]()), random.Random(seed), list[bytes]()
        for second in range(400):
            now = float(second)
            at = dice.random()
            if at < 0.4 or not driver.columns:
                driver.prompt(f"p{second}", dice.choice([1, 1, 1, 3]), now)
            elif at < 0.6:
                path = path_to(dice.choice(list(driver.columns.values())))
                driver.use(path, now)
            elif at < 0.7:
                keys += [one.key for one in [driver.displace(now) for _ in range(4)] if one]
            else:  # as if they expired
                expired = sorted(driver.leaves(), key=lambda one: one.key)[: dice.choice([0, 1, 9])]
                for column in expired:
                    driver.remove(column)
            if second % 10 == 0:
                check_integrity(driver.policy, driver.columns.values())
        while last := driver.displace(400.0):
            keys.append(last.key)
        return keys

    asides = list[int]()
    for module, kind in ((cost, Cost), (leaves, Leaves)):
        monkeypatch.setattr(module, "_SLACK", 2)
        go_through: Callable[..., None] = kind._go_through

        def counted(it: Any, most: int, by: Callable[..., None] = go_through) -> None:
            by(it, most)
            asides.append(len(it._aside))

        monkeypatch.setattr(kind, "_go_through", counted)
    for seed in range(8):
        with monkeypatch.context() as patched:
            at_once = gone(seed)
            for module in (cost, leaves):
                patched.setattr(module, "_AT_ONCE", 3)
                patched.setattr(module, "_FEW", 1)
            assert gone(seed) == at_once
    assert sum(map(bool, asides)) > 100


class TestCost:
    def test_learns_who_comes_back(self) -> None:
        """Two sorts of prompts, one of which always returns after ten seconds and never later."""
        policy = Cost[Column]()
        driver = Driver(policy)
        for number in range(600):
            now = 2.0 * number
            driver.prompt(f"q{number}", 3, now)
            back = [driver.columns.get(key(f"q{number - 5}/{depth}")) for depth in range(3)]
            if number % 2 and all(back):
                driver.use([column for column in back if column], now)
            while len(driver.columns) > 60:
                driver.displace(now)
        first, last = (policy._returns.rate[0][age_of(age)] for age in (8.0, 30.0))
        assert first > 3 * last

    def test_where_room_is_short_the_youngest_go(self) -> None:
        """All return after a minute. There is room for ten seconds: some are kept for a minute."""
        for make, least in ((Lru, 0), (Cost, 100)):
            driver: Driver = Driver(make())
            hits = 0
            for second in range(8000):
                now = float(second)
                column = driver.columns.get(key(f"p{second - 60}"))
                if column:
                    driver.use([column], now)
                    hits += 1
                elif second >= 60:
                    driver.store(f"p{second - 60}", now)
                driver.store(f"p{second}", now)
                while len(driver.columns) > 10:
                    driver.displace(now)
            assert hits >= least, make

    def test_who_is_stored_again_soon_after_it_was_displaced_stays_longer(self) -> None:
        """It is the oldest then, and was never hit."""
        driver = Driver(Cost())
        driver.store("wanted", 0.0)
        driver.displace(1.0)
        wanted = driver.store("wanted", 10.0)
        once = driver.store("once", 12.0)
        assert [driver.displace(20.0), driver.displace(20.0)] == [once, wanted]

    def test_who_was_purged_and_is_stored_again_does_not(self) -> None:
        driver = Driver(Cost())
        driver.remove(driver.store("purged", 0.0))
        purged = driver.store("purged", 10.0)
        driver.store("once", 12.0)
        assert driver.displace(20.0) is purged

    def test_depth_counts_where_it_is_asked_for(self) -> None:
        def kept(policy: Cost[Column]) -> set[bytes]:
            driver = Driver(policy)
            driver.prompt("deep", 50, now=0.0)
            driver.prompt("short", 2, now=30.0)
            driver.displace(40.0)
            return set(driver.columns)

        assert key("deep/49") not in kept(Cost())
        assert key("deep/49") in kept(Cost(attention_columns=1.0))

    def test_of_two_the_larger_goes(self) -> None:
        driver = Driver(Cost())
        small = Column(key("small"), bytes=1024)
        large = Column(key("large"), bytes=8192, used_at=1.5)
        for column in (small, large):
            driver.columns[column.key] = column
            driver.policy.stored(column, column.used_at)
        assert [driver.displace(2.0), driver.displace(2.0)] == [large, small]

    def test_who_is_gone_on_from_hides_nobody_who_waits_behind(self) -> None:
        """The longest waiting leaf got a child, and is used with it again and again."""
        driver = Driver(Cost())
        first = driver.store("first", 0.0)
        forgotten = driver.store("forgotten", 10.0)
        child = driver.store("child", 20.0, first)
        for now in range(30, 1001, 10):
            driver.use([first, child], float(now))
        driver.store("young", 1000.0)
        driver.store("tail", 1000.0, tail=True)  # of a kind that is worth little, but not that little
        assert driver.displace(1000.0) is forgotten


class TestGone:
    def test_who_was_displaced_not_long_ago_is_known(self) -> None:
        gone, names = Gone(), [key(str(number)) for number in range(8000)]
        assert not any(gone.which(names))
        gone.add_all(names[:1000], 1000)
        gone.add_all(names[1000:1100], 1000)
        assert sum(gone.which(names[1000:1100])) > 90  # some overwrite one another
        assert sum(gone.which(names[:1000])) > 500
        assert not any(gone.which(names[1100:]))
        assert [name in gone for name in names] == gone.which(names)

    def test_the_first_half_of_keys_is_enough_as_previews_have_it(self) -> None:
        """Of a small sample: those of the keys that begin with zeros."""
        gone, names = Gone(), [bytes(2) + key(str(number))[:6] for number in range(2000)]
        for name in names[:100]:
            gone.add(name, 1000)
        assert sum(map(gone.__contains__, names[:100])) > 90
        assert not any(map(gone.__contains__, names[100:]))

    def test_who_was_displaced_long_ago_is_not_and_memory_is_bounded(self) -> None:
        gone, names = Gone(), [key(str(number)) for number in range(8000)]
        for name in names:
            gone.add(name, 1000)
        assert sum(gone.which(names[:2000])) < 40
        assert len(gone._slots) == 1024

    def test_with_more_columns_stored_it_knows_as_many_as_before_and_more_from_then_on(self) -> None:
        gone, names = Gone(), [key(str(number)) for number in range(300)]
        gone.add_all(names[:100], 100)
        before = gone.which(names[:100])
        gone.add_all([], 100_000)
        assert gone.which(names[:100]) == before
        gone.add_all(names[100:], 100_000)
        assert sum(gone.which(names[100:])) > 195

    def test_a_large_table_grows_a_part_at_a_time_and_still_knows_who_is_in_it(self) -> None:
        gone, names = Gone(), [key(str(number)) for number in range(10_000)]
        gone.add_all(names[:5000], 16_000)
        before, sizes = gone.which(names[:5000]), list[int]()
        for name in names[5000:5010]:
            gone.add(name, 100_000)
            sizes.append(len(gone._slots))
        assert sizes == [16_384 * min(8, 2 + number) for number in range(10)]
        assert all(gone.which(names[5000:5010]))
        still = [now for now, was in zip(gone.which(names[:5000]), before, strict=True) if was]
        assert still.count(False) <= 10, "those that were overwritten"
        gone.add_all(names[5010:], 100_000)
        assert len(gone._slots) == 131_072
        gone.shrink(10_000)
        assert len(gone._slots) == 32_768
        assert sum(gone.which(names[5010:])) > 1000, "a quarter of them"

    @pytest.mark.parametrize("is_displaced", [True, False])
    def test_an_org_that_has_few_columns_again_keeps_no_table_for_many(
        self,
        is_displaced: bool,  # noqa: FBT001
    ) -> None:
        """Whether they were displaced for others or have expired: there may be thousands of orgs."""
        policy = Cost[Column]()
        columns = [Column(key(str(number)), used_at=number / 10) for number in range(5000)]
        policy.stored_all(columns, 500.0)
        [first] = policy.victims(500.0, 1)
        policy.displaced([first], 500.0)
        assert len(policy._gone._slots) == 8192
        for column in columns:
            if is_displaced:
                policy.displaced(policy.victims(500.0, 1), 500.0)
            elif column is not first:
                policy.removed(column)
            assert len(policy._gone._slots) <= max(1024, 4 * len(policy))
            if len(policy) == 3000:
                assert len(policy._gone._slots) == 8192, "as many may be stored again soon"
            if len(policy) == 1:
                break

    @pytest.mark.parametrize("each", [700, 3000])
    def test_fewer_slots_know_those_of_them_whether_added_at_once_or_one_after_the_other(
        self, each: int
    ) -> None:
        single, runs, names = Gone(), Gone(), [key(str(number)) for number in range(12_000)]
        for begin in range(0, len(names), each):
            run, stored = names[begin : begin + each], len(names) - begin
            runs.add_all(run, stored)
            for place, name in enumerate(run):
                single.add(name, stored - place)
            assert runs._slots == single._slots
        assert len(runs._slots) == 1024
        assert sum(runs.which(names[-300:])) > 250

    def test_those_that_have_displaced_nothing_share_what_they_do_not_write_to(self) -> None:
        first, second = Gone(), Gone()
        first.add(key("a"), 1)
        assert key("a") not in second


def rates_one_by_one(of: Returns, now: float) -> list[list[float]]:
    ages, pending = range(AGES), [list(row) for row in of._lost]
    for since, kind in of._followed.values():
        pending[kind][age_of(now - since)] += 1
    at_risk = [
        [ended[age] + lost[age] / 2 + sum(ended[age + 1 :]) + sum(lost[age + 1 :]) for age in ages]
        for ended, lost in zip(of._ended, pending, strict=True)
    ]
    guess, shape = learning.GUESS_PROMPTS * of._together, learning.SHAPE_PROMPTS * of._together
    common = [
        (sum(row[age] for row in of._ended) + guess * learning._GUESSES[age])
        / (sum(row[age] for row in at_risk) + guess)
        for age in ages
    ]
    rates = []
    for ended, risk, its in zip(of._ended, at_risk, of._expected, strict=True):
        chances = learning._scaled(common, ended, risk, guess, its)
        rates.append(list(learning._rates(learning._chances(ended, risk, chances, shape))))
    return rates


def state_of(returns: Returns) -> tuple[object, ...]:
    rows = list(map(list, returns._ended)), list(map(list, returns._lost))
    return rows, returns._followed, returns.mask, returns._events, returns._unread, returns._together


class TestReturns:
    def test_before_anything_is_known_the_oldest_are_worth_least(self) -> None:
        (rates,) = Returns([1.0]).rate
        assert list(rates) == sorted(rates, reverse=True)

    def test_a_use_that_is_near_is_worth_more_than_one_that_is_far(self) -> None:
        """All return at 64 s: the rate rises up to there and falls behind."""
        returns = Returns([1.0])
        for number in range(20_000):
            name = key(str(number % 500))
            if returns.follows(name):
                returns.used([name], [0], number * 64 / 500)
        returns.refresh(20_000 * 64 / 500)
        (rates,) = returns.rate
        assert rates[age_of(1.0)] < rates[age_of(30.0)] < rates[age_of(60.0)]
        assert rates[age_of(60.0)] > 10 * rates[age_of(200.0)]

    def test_the_sample_is_bounded_and_becomes_sparser(self) -> None:
        returns = Returns([1.0])
        for number in range(40 * SAMPLE_MAX):
            name = number.to_bytes(2, "big", signed=False) if number < 1 << 16 else key(str(number))
            if returns.follows(name):
                returns.used([name], [0], number / 1000)
        check_integrity(returns)
        assert len(returns._followed) > SAMPLE_MAX / 4

    @pytest.mark.parametrize("make", [Cost, Competition])
    def test_what_is_used_often_is_so_in_any_turn(
        self, make: Callable[[], DisplacementPolicy[Column]]
    ) -> None:
        returns = cast("Any", make())._returns
        often = {kind_of(Column(key("a"), turn=turn), 9) for turn in range(9)}
        assert {kind for kind, ordinary in enumerate(returns._ordinary) if not ordinary} == often

    def test_the_sample_has_few_columns_of_one_prompt(self) -> None:
        """Else it would be of few prompts, although it reaches back as far as is needed."""
        returns = Returns([1.0], share=1)
        returns.displaced(0.001)
        for second in range(3000):
            prompt = second % (50 if second < 200 else 400)  # 50 come back from the start
            names = [key(f"{prompt}/{depth}") for depth in range(64)]
            followed = [name for name in names if returns.follows(name)]
            returns.used(followed, [0] * len(followed), float(second))
        assert returns._together <= TOGETHER_MAX
        assert len(returns._followed) > 100

    def test_old_evidence_fades(self) -> None:
        returns = Returns([1.0])
        names = [name for name in map(key, map(str, range(500))) if returns.follows(name)]
        for period, rounds in ((4.0, 300), (100.0, 300)):
            for number in range(rounds):
                now = number * period + (1e4 if period == 100.0 else 0.0)
                returns.used(names, [0] * len(names), now)
        returns.refresh(now)
        (rates,) = returns.rate
        assert rates[age_of(80.0)] > rates[age_of(1.0)]

    @pytest.mark.parametrize("seed", range(5))
    def test_the_rates_are_those_that_each_kind_has_by_itself(
        self, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kinds of which nothing was seen share a table; columns used together are counted together."""
        monkeypatch.setattr(learning, "SAMPLE_MAX", 200)  # some are lost
        chance, expected, now = random.Random(seed), [1.0, 2.0, 1.0, 3.0, 2.0, 1.0, 0.1, 0.1], 0.0
        returns = Returns(expected, share=1)
        returns.displaced(20.0)
        for number in range(3000):
            now += chance.choice([0.0, 0.3, 5.0, -1.0])
            first = chance.randrange(400)
            kinds = chance.choices([0, 1, 4, 6][: 1 + number // 500], k=8)
            names = [key(str(first + place)) for place in range(chance.randrange(1, 9))]
            returns.used(names, kinds[: len(names)], now)
            assert list(returns._followed)[-len(names) :] == names  # the last ones
            before = returns.rate
            returns.refresh(now)
            if returns.rate is not before:
                assert [list(its) for its in returns.rate] == rates_one_by_one(returns, now)
        assert any(map(sum, returns._lost))
        assert returns.rate is not Returns(expected).rate

    def test_beginnings_that_all_share_say_nothing_of_the_others(self) -> None:
        """They come back each second, which is no reason to expect it of the others."""
        alone, beside = (Returns([1.0, 9.0, 1.0], share=1, often=[1]) for _ in range(2))
        for second in range(2000):
            for returns in (alone, beside):
                returns.used([key(str(second % 64))], [0], float(second))
            beside.used([key("shared")], [1], float(second))
        for returns in (alone, beside):
            returns.refresh(2000.0)
        for kind in (0, 2):
            assert list(beside.rate[kind]) == list(alone.rate[kind])
        assert beside.rate[1] != alone.rate[1]

    def test_many_of_one_age_count_as_each_alone(self) -> None:
        at_once, alone = Returns([1.0]), Returns([1.0])
        for age_s, count in ((20.0, 1), (5.0, 40), (300.0, 3)):
            at_once.displaced(age_s, count)
            for _ in range(count):
                alone.displaced(age_s)
        assert at_once._span_s == pytest.approx(alone._span_s)
        assert 5 < alone._span_s < 20

    @pytest.mark.parametrize("at_once", [1, 9])
    def test_evidence_is_that_of_one_column_after_the_other(
        self, at_once: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stored ones count as prompts of one column. In a sample that becomes smaller."""
        monkeypatch.setattr("swdriver_shim.cache.displacement.returns.SAMPLE_MAX", 60)
        returns, other, dice = Returns([1.0] * 3, share=1), Returns([1.0] * 3, share=1), random.Random(1)
        ended, last = Counter[tuple[int, int]](), dict[bytes, tuple[float, int]]()
        for number in range(300):
            now = 0.7 * number
            names = dice.sample([key(str(name)) for name in range(50)], at_once)
            kinds = sorted(dice.choices(range(3), k=at_once))
            for name, kind in zip(names, kinds, strict=True):
                if its := last.get(name):
                    ended[its[1], age_of(now - its[0])] += 1
                last[name] = now, kind
            returns.used(names, kinds, now)
            if at_once == 1:
                other.stored(names[0], kinds[0], now)
        counted = {(kind, age): its for kind in range(3) for age, its in enumerate(returns._ended[kind])}
        assert Counter({place: its for place, its in counted.items() if its}) == ended
        assert returns._followed == last
        if at_once == 1:
            assert state_of(other) == state_of(returns)
            for number in range(100):
                returns.used([key(f"more {number}")], [0], 300.0 + number)
                other.stored(key(f"more {number}"), 0, 300.0 + number)
            assert returns.mask > 0
            assert state_of(other) == state_of(returns)

    def test_kinds_are_those_of_each_column(self) -> None:
        dice = random.Random(1)
        for number in range(200):
            path = [Column(key(f"{number}/{depth}"), turn=number % 3) for depth in range(5)]
            for place in dice.sample(range(5), dice.randint(0, 2)):
                path[place].uses, path[place].mark = dice.choice([(0, AGAIN), (1, None), (7, AGAIN)])
            path[-1].tail = dice.random() < 0.3
            keys, kinds = keys_and_kinds(path)
            assert keys == [one.key for one in path]
            assert kinds == [kind_of(one, one.uses + 1) for one in path]

    def test_evidence_fades_where_nobody_makes_room(self) -> None:
        returns, names = Returns([1.0], share=1), [key(str(number)) for number in range(64)]
        for number in range(1000):
            returns.used(names, [0] * len(names), 10.0 * number)
        assert sum(map(sum, returns._ended)) <= 16384

    @pytest.mark.parametrize("make", [Cost, Competition])
    @pytest.mark.parametrize("most", [1, 8])
    def test_rates_are_computed_where_room_is_made_and_in_no_look_up(
        self, make: Callable[[], DisplacementPolicy[Column]], most: int
    ) -> None:
        policy = make()
        returns, driver = cast("Any", policy)._returns, Driver(policy)
        policy.victim(0.0)  # from here on miniatures are asked in look-ups, too
        for number in range(40):
            driver.prompt(f"p{number}", 64, 0.0)
        before = returns.rate
        for number in range(200):
            driver.use(path_to(driver.columns[key(f"p{number % 40}/63")]), 1.0 + number)
        assert returns.rate is before
        assert policy.victims(300.0, most) if most > 1 else policy.victim(300.0)
        assert returns.rate is not before

    @pytest.mark.parametrize("age", [-1.0, 0.0, 1e-9, 1e12])
    def test_any_age_is_one(self, age: float) -> None:
        returns = Returns([1.0, 1.0])
        assert all(rates[age_of(age)] > 0 for rates in returns.rate)


@pytest.mark.parametrize("make", [POLICIES["arc"], Cost, POLICIES["s3fifo"]])
def test_who_was_asked_about_as_the_next_victim_and_expires_was_not_displaced(
    make: Callable[[], DisplacementPolicy[Column]],
) -> None:
    """Promotion only asks. A column that is stored again after it was displaced has a mark."""
    driver = Driver(make())
    driver.prompt("stays", 20, 0.0)
    leaf = driver.store("leaf", 0.0)
    while driver.policy.victim(1.0) is not leaf:
        driver.displace(1.0)
    driver.remove(leaf)
    again = driver.store("leaf", 2.0)
    assert again.mark is None
    driver.prompt("newer", 20, 2.5)
    while driver.displace(3.0) is not again:
        pass
    assert driver.store("leaf", 4.0).mark is not None


def test_newcomers_do_not_rank_with_who_was_asked_about_and_was_not_displaced() -> None:
    driver = Driver(Lfu())
    asked = driver.store("asked", 0.0)
    for second in range(1, 4):
        driver.use([asked], float(second))
    assert driver.policy.victim(4.0) is asked
    driver.remove(asked)
    newer = driver.store("newer", 5.0)
    assert newer.mark == 0
    driver.use([newer], 6.0)
    assert driver.displace(7.0) is newer
    assert driver.store("newest", 8.0).mark == 1


@pytest.mark.parametrize("make", [Cost, Competition])
def test_what_is_learned_reaches_back_as_far_as_the_age_of_all_who_are_displaced(
    make: Callable[[], Cost[Column] | Competition[Column]],
) -> None:
    policy, expected = make(), Returns([1.0])
    driver = Driver(policy)
    driver.prompt("talk", 5, 0.0)
    for _ in range(5):
        assert driver.displace(100.0)
        expected.displaced(100.0)
    assert policy._returns._span_s == expected._span_s > 0


def test_an_arc_makes_no_room_for_newcomers_when_who_was_used_more_often_comes_back() -> None:
    driver = Driver(POLICIES["arc"]())
    often = driver.store("often", 0.0)
    driver.use([often], 1.0)
    assert driver.displace(2.0) is often
    driver.store("often", 3.0)
    newer = driver.store("newer", 4.0)
    assert driver.displace(5.0) is newer


def test_of_s3fifo_who_is_displaced_from_the_main_queue_is_a_newcomer_again() -> None:
    driver = Driver(POLICIES["s3fifo"]())
    driver.prompt("in use", 20, 0.0)[-1].ref_count += 1
    used = driver.store("used", 0.0)
    for second in (1.0, 2.0):
        driver.use([used], second)
    assert driver.displace(3.0) is used
    assert used.mark is not None, "it was in the main queue"
    assert driver.store("used", 4.0).mark is None


def test_whoever_is_worth_least_changes_as_time_passes() -> None:
    """Nobody comes and nobody goes: an old column is displaced before a tail that was just used, and the
    tail once it is older."""
    driver = Driver(Cost())
    old = driver.store("old", 0.0)
    tail = driver.store("tail", 50.0, tail=True)
    assert driver.policy.victim(50.0) is old
    assert driver.policy.victim(60.0) is tail


def test_leaves_that_are_held_when_their_turn_comes_leave_nothing_behind() -> None:
    """By reading prompts are pinned, all of them at once; nobody may go, and no entry may stay."""
    driver = Driver(Cost())
    for number in range(200):
        driver.store(f"prompt {number}", 0.0).ref_count += 1
    assert driver.displace(1.0) is None
    check_integrity(driver.policy, driver.columns.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_last_use_may_be_before_this_machine_started(name: str) -> None:
    """A cache that is taken up again after a restart has last uses before the clock's zero."""
    driver = Driver(POLICIES[name]())
    for used_at in (-90_000.5, -90_002.5, 1.5):
        driver.store(str(used_at), used_at)
    check_integrity(driver.policy, driver.columns.values())
    while driver.displace(2.0):
        check_integrity(driver.policy, driver.columns.values())
    assert not driver.columns


class TestCompetition:
    def serve(self, driver: Driver, name: str, length: int, now: float, room: int) -> int:
        """A request for a prompt; returns how many columns were hit."""
        path: list[Column] = []
        for depth in range(length):
            column = driver.columns.get(key(f"{name}/{depth}"))
            if column is None:
                break
            path.append(column)
        if path:
            driver.use(path, now)
        hits = len(path)
        for depth in range(hits, length):
            path.append(driver.store(f"{name}/{depth}", now, path[-1] if path else None))
        while len(driver.columns) > room:
            driver.displace(now)
        return hits

    def test_nothing_competes_while_there_is_room(self) -> None:
        policy = Competition[Column]()
        driver = Driver(policy)
        for number in range(50):
            driver.prompt(f"p{number}", 10, float(number))
        assert not policy._miniatures
        driver.displace(50.0)
        assert [one.name for one in policy._miniatures] == list(COMPETING)
        assert not policy.standings, "nothing was used since"

    def test_traffic_without_hits_changes_nothing(self) -> None:
        policy = Competition[Column](share=1)
        driver = Driver(policy)
        for number in range(1000):
            self.serve(driver, f"p{number}", 4, float(number), room=200)
        assert (policy.in_use, policy.since) == (Cost.name, None)
        assert policy.standings == tuple(Standing(name, 0.0) for name in COMPETING)

    def test_the_one_with_most_hits_is_used(self) -> None:
        """All prompts come in each round, in another order, and there is room for most of them: what was
        used longest ago comes soonest, so that the policy that is used first is among the worst."""
        dice, order = random.Random(3), [f"p{number}" for number in range(130)]
        names = [name for _ in range(30) for name in dice.sample(order, len(order))]

        def run(policy: DisplacementPolicy[Column], used_first: str = "") -> int:
            driver, hits = Driver(policy), 0
            for now, name in enumerate(names):
                hits += self.serve(driver, name, 3, float(now), room=300)
                if used_first and isinstance(policy, Competition) and policy._miniatures:
                    policy._use(next(o for o in policy._miniatures if o.name == used_first), float(now))
                    used_first = ""
            return hits

        hits = {name: run(POLICIES[name]()) for name in COMPETING}
        best = max(hits, key=lambda name: hits[name])
        assert hits[Lru.name] < 0.7 * hits[best]
        policy = Competition[Column](share=1)
        found = run(policy, used_first=Lru.name)
        assert policy.in_use == best
        assert found >= 0.9 * hits[best]
        standings = {one.policy: one.hit_rate for one in policy.standings}
        assert standings[best] == max(standings.values())

    def test_it_takes_less_to_go_back_to_the_first_than_to_leave_it(self) -> None:
        """Of five differences of one size one is the other way: a gain between one and two errors."""
        policy = Competition[Column](share=1)
        driver = Driver(policy)
        driver.prompt("p", 100, 0.0)
        driver.displace(0.0)
        cost, arc = policy._miniatures[:2]
        assert (cost.name, arc.name) == (Cost.name, "arc")

        def compare(ahead: Miniature[Column], times: int) -> None:
            other = cost if ahead is arc else arc
            for place in range(times):
                first, second = (other, ahead) if place == 1 else (ahead, other)
                policy._seen, first.recent, second.recent = OBSERVED, OBSERVED, 0
                policy._compare(policy._room, 1.0)

        compare(arc, 5)
        assert policy.in_use == Cost.name
        policy._use(arc, 1.0)
        policy._active = Lru()  # the change has ended
        compare(cost, 5)
        assert policy.in_use == Cost.name

    def test_it_says_what_is_used_since_when_and_why(self) -> None:
        policy = Competition[Column]()
        driver = Driver(policy)
        driver.prompt("p", 10, 0.0)
        assert policy.choice(5.0) == Choice(in_use=Cost.name, seconds=None, standings=())
        driver.displace(5.0)
        policy._use(policy._miniatures[1], 6.0)
        told = policy.choice(9.0)
        assert (told.in_use, told.seconds, told.standings) == ("arc", 3.0, ())
        for number in range(100):
            driver.prompt(f"more {number}", 4, 10.0)
        told = policy.choice(11.0)
        assert [one.policy for one in told.standings] == list(COMPETING)

    def test_another_one_comes_into_use_as_columns_are_stored(self) -> None:
        policy = Competition[Column]()
        driver = Driver(policy)
        for number in range(40):
            driver.prompt(f"p{number}", 10, float(number))
        driver.displace(40.0)
        policy._use(next(one for one in policy._miniatures if one.name == "lru"), 41.0)
        number = 0
        while isinstance(policy._active, Changeover):
            number += 1
            driver.store(f"more {number}", 42.0)
        assert number == (400 - 1) // MOVED + 1
        assert (policy._active.name, policy.in_use, policy.since) == ("lru", "lru", 41.0)
        check_integrity(policy, driver.columns.values())

    @pytest.mark.parametrize("name", list(COMPETING))
    def test_a_miniature_of_objects_has_each_once_and_hits_each_for_itself(self, name: str) -> None:
        """What has no others before it is asked for in any order, with gaps, and twice."""
        dice = random.Random(4)
        objects = [Column(key(f"object {number}")) for number in range(30)]
        one = Miniature[Column](name, POLICIES[name]())
        for now in range(2000):
            path = dice.choices(objects, k=dice.randint(1, 8))
            there = sum(column.key in one.columns for column in path)
            before = one.recent
            one.ask(path, b"", float(now), room=10.0)
            assert one.recent - before == there
            assert len(one.columns) == len(one.policy) <= 10
            assert all(not column.ref_count for column in one.columns.values())

    def test_the_sample_does_not_grow_with_the_store(self) -> None:
        policy = Competition[Column](share=1)
        driver = Driver(policy)
        for number in range(3 * SAMPLE_COLUMNS):
            driver.prompt(f"p{number}", 2, float(number))
            if number == SAMPLE_COLUMNS:
                driver.displace(float(number))
        assert SAMPLE_COLUMNS / 2 < len(policy._sample) <= 2 * SAMPLE_COLUMNS
        assert all(len(one.columns) <= 2 * SAMPLE_COLUMNS for one in policy._miniatures)
        check_integrity(policy, driver.columns.values())

    def test_the_sample_grows_again_as_the_store_shrinks(self) -> None:
        """Of a few columns nobody could tell which policy is better."""
        policy = Competition[Column]()
        driver = Driver(policy)
        for number in range(120 * SAMPLE_COLUMNS // 4):
            driver.prompt(f"p{number}", 4, float(number))
        driver.displace(10_000.0)
        mask = policy._mask
        while len(driver.columns) > 8 * SAMPLE_COLUMNS:
            driver.displace(10_000.0)
        for number in range(500):
            self.serve(driver, f"q{number}", 4, 10_000.0 + number, room=8 * SAMPLE_COLUMNS)
        assert policy._mask < mask
        assert SAMPLE_COLUMNS / 2 <= len(policy._sample) <= 2 * SAMPLE_COLUMNS
        assert all(len(one.columns) > SAMPLE_COLUMNS / 4 for one in policy._miniatures)
        check_integrity(policy, driver.columns.values())

    def test_of_a_very_small_store_no_hit_rates_are_shown(self) -> None:
        policy = Competition[Column]()
        driver = Driver(policy)
        for number in range(400):
            self.serve(driver, f"p{number % 40}", 2, float(number), room=20)
        assert policy._used
        assert not policy.standings

    def test_what_comes_back_and_is_used_then_counts_once(self) -> None:
        """A column of tier 2 is stored again because of a request that uses it next: that is no hit."""
        policy = Competition[Column](share=1, share_learned=1)
        driver = Driver(policy)
        for number in range(1500):
            column = Column(key(f"p{number}"), None, number - 5.0, number - 5.0)
            driver.columns[column.key] = column
            policy.stored(column, float(number))
            driver.use([column], float(number))
            while len(driver.columns) > 200:
                driver.displace(float(number))
        assert policy.standings == tuple(Standing(name, 0.0) for name in COMPETING)
        assert not any(map(sum, policy._returns._ended)), "it was no return within a moment"


def test_a_leaf_that_is_let_go_and_is_worth_as_little_as_the_last_victim_leaves_no_entry() -> None:
    """Found by `make sim-long` (driver:20074): one more entry than a heap may have."""
    cost: Cost[Column] = Cost()
    driver = Driver(cost)
    columns = [driver.store(f"{number}", 0.0) for number in range(_SLACK + 40)]
    for column in columns[: len(columns) - 20]:  # until as many are stale as may be
        driver.remove(column)
    assert cost._entries == 2 * len(cost._waiting) + _SLACK
    assert driver.policy.victim(0.0)
    columns[-1].ref_count += 1
    driver.release(columns[-1])
    check_integrity(cost, driver.columns.values())
