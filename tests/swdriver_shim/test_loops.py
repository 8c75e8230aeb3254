"""The compiled loops over a prompt do what those in Python do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.mover import PYTHON as PYTHON_MOVER
from swdriver_shim import loops
from swdriver_shim.cache.prefix_map import Account, Column, PrefixMap, State
from swdriver_shim.keys import Keys, Media, Namespace, encode
from swdriver_shim.loops import PYTHON, Loops
from swdriver_shim.policy import Policy
from tests.kvss_agent.compiled import STRICT, built

SECRET = bytes(range(32))
NAMESPACE = Namespace("llama", "r1", "bf16", "full:64")
NOW = 1000.0
AGES = st.sampled_from([0, 1.0, 500.0, 1000.0, 1000, 2000.0])


@pytest.fixture(scope="module")
def mover(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built(tmp_path_factory.mktemp("native"), STRICT)


@pytest.fixture(scope="module")
def compiled(mover: Any) -> Loops:
    return loops.of(mover)


@contextmanager
def in_use(these: Loops) -> Iterator[None]:
    before, loops.current = loops.current, these
    try:
        yield
    finally:
        loops.current = before


def test_all_are_compiled_but_what_this_machine_has_no_instructions_for(mover: Any) -> None:
    names = {one.name for one in fields(Loops)}
    without = loops.of(SimpleNamespace(**{name: getattr(mover, name) for name in names}, has_sha=False))
    assert without.chained is loops.chained
    assert without.find is mover.find
    assert loops.of(mover).chained is (mover.chained if mover.has_sha else loops.chained)
    assert {name for name in names if getattr(without, name) is getattr(PYTHON, name)} == {"chained"}


@st.composite
def tokens(draw: st.DrawFn) -> list[Any]:
    anything = st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 2**18))
    return draw(st.lists(anything, max_size=300))


NO_TOKENS = st.sampled_from([-1, 2**32, -(2**40), 2**70, "7", None, 1.0, b"x", [1]])


@dataclass
class Whole:
    """What counts as a whole number, as those of numpy do."""

    value: int

    def __index__(self) -> int:
        return self.value


@given(given_tokens=tokens())
def test_tokens_are_packed(compiled: Loops, given_tokens: list[int]) -> None:
    expected = PYTHON.packed(given_tokens)
    assert compiled.packed(given_tokens) == expected
    assert compiled.packed(tuple(given_tokens)) == expected
    assert compiled.packed([Whole(one) for one in given_tokens]) == expected  # type: ignore[misc]
    assert compiled.packed([True, False]) == PYTHON.packed([True, False])


@given(good=tokens(), bad=NO_TOKENS)
def test_what_is_no_token_is_refused(compiled: Loops, good: list[Any], bad: object) -> None:
    for asked in ([*good, bad], [bad, *good]):
        for one in (PYTHON, compiled):
            with pytest.raises((OverflowError, TypeError)):
                one.packed(asked)


class Running:
    """A number that runs code when it is looked at."""

    def __init__(self, what: Callable[[], object]) -> None:
        self._what = what

    def __float__(self) -> float:
        self._what()
        return 2000.0

    def __index__(self) -> int:
        self._what()
        return 3


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("stored_at", lambda one, of: one.fresh(of, 0, State.READY, 0.0, 0.0, NOW)),
        ("used_at", lambda one, of: one.fresh(of, 0, State.READY, 0.0, 0.0, NOW)),
        ("uses", lambda one, of: one.stamp(of, NOW)),
    ],
)
def test_numbers_that_run_code_while_columns_are_read_are_refused(
    compiled: Loops, name: str, call: Any
) -> None:
    """It could drop the column that is being read."""
    columns = [column(World().map, 1)]
    columns[0].state = State.READY
    columns[0].stored_at = columns[0].used_at = 1.0
    setattr(columns[0], name, Running(columns.clear))
    with pytest.raises(TypeError, match="int"):
        call(compiled, columns)
    assert len(columns) == 1, "it did not run"


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(f"{name} was looked up by code of its own")


class Strange(metaclass=Meta):
    __slots__ = ("key", "priority", "state", "stored_at", "ttl", "used_at", "uses")


def test_a_list_that_shrinks_while_it_is_packed_is_refused(compiled: Loops) -> None:
    asked: list[Any] = []

    class Shrinking:
        def __index__(self) -> int:
            asked.clear()
            return 7

    asked += [Shrinking(), *range(100)]
    with pytest.raises(TypeError, match="fewer"):
        compiled.packed(asked)


@given(raw=st.binary(max_size=5000), unit=st.sampled_from([1, 3, 48, 64, 128, 65536]))
def test_states_and_keys_are_the_same(compiled: Loops, raw: bytes, unit: int) -> None:
    key, first = bytes(range(64)), bytes(range(100, 132))
    for given_raw in (raw, bytearray(raw), memoryview(raw)):
        assert compiled.chained(key, first, given_raw, unit) == PYTHON.chained(key, first, raw, unit)


def test_a_large_unit_has_its_key(compiled: Loops) -> None:
    raw = bytes(range(256)) * 2048
    for unit in (65536, 65535, 1000):
        expected = PYTHON.chained(bytes(64), bytes(32), raw, unit)
        assert expected[0]
        assert compiled.chained(bytes(64), bytes(32), raw, unit) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        (bytes(63), bytes(32), b"", 64),
        (bytes(64), bytes(31), b"", 64),
        (bytes(64), bytes(32), b"", 0),
        (bytes(64), bytes(32), b"", -1),
        (bytes(64), bytes(32), b"", 1 << 40),
        (bytes(64), bytes(32), "text", 64),
        (bytes(64), bytes(32), b"", None),
        (bytes(64), bytes(32), b""),
    ],
)
def test_the_compiled_chain_checks_what_it_is_given(mover: Any, wrong: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        mover.chained(*wrong)


def test_compiled_loops_that_make_wrong_keys_are_not_used(mover: Any) -> None:
    names = {one.name for one in fields(Loops)}
    wrong = SimpleNamespace(**{name: getattr(mover, name) for name in names}, has_sha=True)
    wrong.chained = lambda *asked: (bytes(64), mover.chained(*asked)[1])
    assert loops.of(wrong) is PYTHON


@given(given_tokens=tokens(), unit=st.sampled_from([64, 128]))
def test_a_prompt_has_the_same_keys(compiled: Loops, given_tokens: list[int], unit: int) -> None:
    maker = Keys("acme", SECRET, NAMESPACE, unit)
    media = [Media(70, 90, b"cat"), Media(130, 260, b"dog"), Media(10**12, 10**12 + 5, b"far")]
    for its in ([], media, media[1:]):
        with in_use(PYTHON):
            expected = maker.prompt(given_tokens, media=its)
        with in_use(compiled):
            found = maker.prompt(encode(given_tokens[:100]), media=its)
            found.extend(given_tokens[100:])
        assert (found.states, found.keys) == (expected.states, expected.keys)


# Columns


def column(prefix_map: PrefixMap, number: int) -> Column:
    return prefix_map.add(number.to_bytes(16, "big"), None, number)


@dataclass
class World:
    map: PrefixMap = field(
        default_factory=lambda: PrefixMap(Account("acme", 1), NAMESPACE, 0, 4096, linked=False)
    )


@st.composite
def columns(draw: st.DrawFn) -> list[Column | None]:
    """Some that can be served, in any order with some that can't."""
    world = World()
    world.map.account.policy = Policy(ttl_first_use_seconds=900, ttl_last_use_seconds=None)
    found: list[Column | None] = []
    for number in range(draw(st.integers(0, 12))):
        if draw(st.integers(0, 9)) == 0:
            found.append(None)
            continue
        if draw(st.booleans()):
            one = column(world.map, number)
        else:
            one = world.map.add_tail(number.to_bytes(16, "big"), None, number, 5, b"")
        one.state = draw(st.sampled_from([State.READY] * 6 + [*State]))
        one.stored_at, one.used_at = draw(AGES), draw(AGES)
        one.ttl = draw(st.sampled_from([None, None, None, 100, 5000]))
        one.slot, one.uses, one.priority = number, draw(st.integers(0, 3)), draw(st.integers(0, 2))
        found.append(one)
    return found


@given(given_columns=columns(), start=st.integers(0, 15), born=AGES, seen=AGES)
def test_as_many_columns_are_fresh(
    compiled: Loops, given_columns: list[Column | None], start: int, born: float, seen: float
) -> None:
    asked = given_columns, start, State.READY, born - 1, seen - 1, NOW
    expected = PYTHON.fresh(*asked)
    assert compiled.fresh(*asked) == max(0, expected)


@given(given_columns=columns())
def test_as_many_columns_are_ready(compiled: Loops, given_columns: list[Column | None]) -> None:
    asked = given_columns, State.READY
    assert compiled.ready(*asked) == PYTHON.ready(*asked)


@given(
    keys=st.lists(st.binary(min_size=16, max_size=16), unique=True),
    bits=st.sampled_from([0, 1, 3, 63, 255]),
)
def test_the_same_columns_are_in_a_sample(compiled: Loops, keys: list[bytes], bits: int) -> None:
    world = World()
    some = [world.map.add(key, None, 0) for key in keys]
    assert compiled.sampled(some, bits) == PYTHON.sampled(some, bits)


class Other:
    """Has a field that is a slot of another class."""

    __slots__ = ()
    priority = Column.__dict__["priority"]


@given(given_columns=columns())
def test_values_and_stamps_are_the_same(compiled: Loops, given_columns: list[Column | None]) -> None:
    some_columns = [one for one in given_columns if one is not None]
    for name in ("slot", "priority", "key", "uses"):
        assert compiled.values_of(some_columns, name) == PYTHON.values_of(some_columns, name)
    uses = [one.uses for one in some_columns]
    compiled.stamp(some_columns, NOW + 1)
    assert [(one.used_at, one.uses) for one in some_columns] == [(NOW + 1, n + 1) for n in uses]
    PYTHON.stamp(some_columns, NOW + 2)
    assert [(one.used_at, one.uses) for one in some_columns] == [(NOW + 2, n + 2) for n in uses]


@given(there=st.sets(st.integers(0, 40)), asked=st.lists(st.integers(0, 40), max_size=50))
def test_columns_are_found(compiled: Loops, there: set[int], asked: list[int]) -> None:
    world = World()
    for number in there:
        column(world.map, number)
    keys = [number.to_bytes(16, "big") for number in asked]
    assert compiled.find(world.map.columns, keys) == PYTHON.find(world.map.columns, keys)


def test_nothing_is_leaked_and_nothing_let_go_of(compiled: Loops) -> None:
    world = World()
    one = column(world.map, 1)
    one.state, one.stored_at = State.READY, 123.5
    counted = [one, one.key, one.stored_at, State.READY]
    before = [sys.getrefcount(each) for each in counted]
    for _ in range(50):
        compiled.find(world.map.columns, [one.key])
        compiled.fresh([one], 0, State.READY, 0.0, -1.0, NOW)
        compiled.values_of([one], "key")
        compiled.sampled([one], 0)
        one.used_at = 0.0
        compiled.stamp([one], NOW)
        compiled.packed([1000] * 10)
        compiled.chained(bytes(64), bytes(32), bytes(512), 64)
    assert [sys.getrefcount(each) for each in counted] == before


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.find({}, ["text"]),
        lambda one: one.find([], []),
        lambda one: one.fresh([object()], 0, State.READY, 0.0, 0.0, 0.0),
        lambda one: one.fresh((), 0, State.READY, 0.0, 0.0, 0.0),
        lambda one: one.fresh([], 0, State.READY, "early", 0.0, 0.0),
        lambda one: one.values_of([object()], "slot"),
        lambda one: one.values_of([column(World().map, 1)], "no such field"),
        lambda one: one.values_of([column(World().map, 1)], "group"),
        lambda one: one.values_of([Other()] * 3, "priority"),
        lambda one: one.ready([object()], State.READY),
        lambda one: one.packed(""),
        lambda one: one.sampled([object()], 1),
        lambda one: one.sampled([column(World().map, 1)], "1"),
        lambda one: one.stamp([None], 0.0),
        lambda one: one.stamp([column(World().map, 1)], "now"),
        lambda one: one.stamp([object.__new__(Strange)], 0.0),
        lambda one: one.sampled([object.__new__(Strange)], 1),
    ],
)
def test_the_compiled_loops_refuse_what_is_no_column(compiled: Loops, call: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        call(compiled)


def test_they_change_with_the_mover(mover: Any) -> None:
    with in_use(loops.current):
        loops._FOLLOWER.use_mover(mover)
        assert loops.current.find is mover.find
        loops._FOLLOWER.use_mover(PYTHON_MOVER)
        assert loops.current is PYTHON
