"""The compiled loops over a prompt do what those in Python do."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import multiprocessing
import random
import sys
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hitrate import Column as BenchmarkColumn
from kvss_agent.mover import PYTHON as PYTHON_MOVER
from swdriver_shim import loops
from swdriver_shim.cache.displacement.competition import _Column as CompetingColumn
from swdriver_shim.cache.displacement.cost import Cost
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.prefix_map import Account, Column, PlainFields, PrefixMap, State, terms_of
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.reuse.miniature import Column as MiniatureColumn
from swdriver_shim.cache.reuse.sample import Reference
from swdriver_shim.keys import Keys, Media, Namespace, Prompt, encode
from swdriver_shim.loops import KEY_BYTES, PART_BYTE, PYTHON, Loops
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.kvss_agent.compiled import STRICT, built
from tests.swdriver_shim.forests import Column as ForestColumn
from tests.swdriver_shim.kinds_of_columns import columns_with
from tests.swdriver_shim.kinds_of_loops import loops_in_use
from tests.swdriver_shim.ledgers import C, conversation, ledger, store
from tests.swdriver_shim.prompts import NAMESPACE, OTHER, prompt

SECRET = bytes(range(32))
SOME_KEYS = [bytes([number]) * 16 for number in range(8)]
NOW = 1000.0
AGES = st.sampled_from([0, 1.0, 500.0, 1000.0, 1000, 2000.0])


@pytest.fixture(scope="module")
def mover(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built(tmp_path_factory.mktemp("native"), STRICT)


@pytest.fixture(scope="module")
def compiled(mover: Any) -> Loops:
    return loops.of(mover)


@pytest.fixture(params=["numbers", "objects"], scope="module", autouse=True)
def is_compact(request: pytest.FixtureRequest, mover: Any) -> Iterator[bool]:
    """Whether columns have numbers that are no objects, as compiled ones have."""
    with columns_with(mover.Fields if request.param == "numbers" else PlainFields):
        yield request.param == "numbers"


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
    compiled: Loops, name: str, call: Any, *, is_compact: bool
) -> None:
    """It could drop the column that is being read."""
    if is_compact and name == "uses":
        return  # it has run by the time that it is a field
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
    __slots__ = (
        "depth",
        "key",
        "parent",
        "state",
        "stored_at",
        "terms",
        "used_at",
        "uses",
    )


def test_a_list_that_shrinks_while_it_is_packed_is_refused(compiled: Loops) -> None:
    asked: list[Any] = []

    class Shrinking:
        def __index__(self) -> int:
            asked.clear()
            return 7

    asked += [Shrinking(), *range(100)]
    with pytest.raises(TypeError, match="fewer"):
        compiled.packed(asked)


@given(
    seed=st.integers(),
    unit=st.sampled_from([16, 48, 64, 128]),
    units=st.integers(0, 9),
    more=st.integers(0, 63),
)
def test_states_and_keys_are_the_same(
    compiled: Loops, seed: int, unit: int, units: int, more: int
) -> None:
    """The compiled ones hash two units at a time."""
    key, first = bytes(range(64)), bytes(range(100, 132))
    raw = random.Random(seed).randbytes(4 * unit * units + more)
    for given_raw in (raw, bytearray(raw), memoryview(b"x" + raw)[1:]):  # at any address
        assert compiled.chained(key, first, given_raw, unit) == PYTHON.chained(key, first, raw, unit)


def test_a_large_unit_has_its_key(compiled: Loops) -> None:
    raw = bytes(range(256)) * 2048
    for unit in (65536, 65520, 1008):
        expected = PYTHON.chained(bytes(64), bytes(32), raw, unit)
        assert expected[0]
        assert compiled.chained(bytes(64), bytes(32), raw, unit) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        (bytes(63), bytes(32), b"", 64),
        (bytes(64), bytes(31), b"", 64),
        (bytes(64), bytes(32), b"", 0),
        (bytes(64), bytes(32), b"", 24),
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
    wrong.chained = lambda key, first, raw, unit: mover.chained(key, first, raw[:256] * 5, unit)
    assert loops.of(wrong) is PYTHON, "it hashes the first unit's tokens for all"


@given(given_tokens=tokens(), unit=st.sampled_from([64, 128]))
def test_a_prompt_has_the_same_keys(compiled: Loops, given_tokens: list[int], unit: int) -> None:
    maker = Keys("acme", SECRET, NAMESPACE, unit)
    media = [Media(70, 90, b"cat"), Media(130, 260, b"dog"), Media(10**12, 10**12 + 5, b"far")]
    for its in ([], media, media[1:]):
        with loops_in_use(PYTHON):
            expected = maker.prompt(given_tokens, media=its)
        with loops_in_use(compiled):
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
        ttl = draw(st.sampled_from([None, None, None, 100, 5000]))
        one.slot, one.uses = number, draw(st.integers(0, 3)) or int("1000")  # an object each
        one.terms = terms_of(draw(st.integers(0, 2)), 0, ttl)
        found.append(one)
    return found


@given(given_columns=columns(), start=st.integers(0, 15), born=AGES, seen=AGES)
def test_as_many_columns_are_fresh(
    compiled: Loops, given_columns: list[Column | None], start: int, born: float, seen: float
) -> None:
    asked = given_columns, start, State.READY, born - 1, seen - 1, NOW
    expected = PYTHON.fresh(*asked)
    assert compiled.fresh(*asked) == max(0, expected)


@given(
    keys=st.lists(st.binary(min_size=16, max_size=16), unique=True),
    bits=st.sampled_from([0, 1, 3, 63, 255, 256, 1023, 16383, 65535]),
)
def test_the_same_columns_are_in_a_sample(compiled: Loops, keys: list[bytes], bits: int) -> None:
    world = World()
    some = [world.map.add(key, None, 0) for key in keys]
    assert compiled.sampled(some, bits) == PYTHON.sampled(some, bits)
    assert compiled.sampled(tuple(some), bits) == PYTHON.sampled(some, bits)


@given(
    keys=st.lists(st.binary(min_size=16, max_size=16)),
    some=st.lists(st.integers(0, 99)),
    slots=st.integers(1, 20),
)
def test_the_same_numbers_are_noted(
    compiled: Loops, keys: list[bytes], some: list[int], slots: int
) -> None:
    added = [keys[place % len(keys)] for place in some] if keys else []
    one, other = (array("Q", bytes(8 * slots)) for _ in range(2))
    for begin in range(0, len(added), 3):
        PYTHON.note(added[begin : begin + 3], one)
        compiled.note(added[begin : begin + 3], other)
        assert one == other
        assert compiled.noted(keys, one) == PYTHON.noted(keys, one)
        assert compiled.noted(added[begin : begin + 3][-1:], one) == [True]


@given(
    keys=st.lists(st.binary(min_size=3, max_size=4), min_size=1),
    number=st.sampled_from([1, 2, 256]),
    data=st.data(),
)
def test_columns_are_put_into_the_same_parts(
    compiled: Loops, keys: list[bytes], number: int, data: st.DataObject
) -> None:
    some = [object() for _ in keys]
    dropped = data.draw(st.lists(st.sampled_from(keys), unique=True))
    found = list[list[dict[bytes, object]]]()
    for these in (PYTHON, compiled):
        parts: list[dict[bytes, object]] = [{} for _ in range(number)]
        these.put_by_key(parts, keys, some)
        assert these.find(parts, [], [], 0, State.READY, False) == 0
        assert {key: one for part in parts for key, one in part.items()} == dict(
            zip(keys, some, strict=True)
        )
        these.drop_by_key(parts, dropped)
        assert {key for part in parts for key in part} == {*keys} - {*dropped}
        with pytest.raises(KeyError):
            these.drop_by_key(parts, [*dropped, b"none"])
        with pytest.raises(ValueError, match="as many columns as keys"):
            these.put_by_key(parts, keys, [*some, None])
        found.append(parts)
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [31, 32, 33, 100])
def test_of_many_keys_each_is_put_and_found_and_dropped(compiled: Loops, count: int) -> None:
    """They are prefetched some at a time."""
    keys = [hashlib.sha256(bytes([number])).digest()[:KEY_BYTES] for number in range(count)]
    parts: list[dict[bytes, object]] = [{} for _ in range(8)]
    with pytest.raises(TypeError):
        compiled.put_by_key(parts, [*keys, "text"], [*keys, 0])  # type: ignore[list-item]
    expected = [{key: key for key in keys if key[PART_BYTE] % 8 == part} for part in range(8)]
    assert parts == expected
    assert compiled.values_in(tuple(parts), keys, None) == keys
    with pytest.raises(TypeError):
        compiled.drop_by_key(parts, [*keys, "text"])  # type: ignore[list-item]
    assert parts == [{}] * 8
    assert compiled.values_in(tuple(parts), keys, None) == [None] * count


@contextmanager
def between_nothing(items: list[bytes]) -> Iterator[list[bytes]]:
    """A list of these, before and behind which null pointers are: who looks at one ends the process."""

    class Layout(ctypes.Structure):
        _fields_ = (
            ("head", ctypes.c_ssize_t * 3),
            ("items", ctypes.c_void_p),
            ("room", ctypes.c_ssize_t),
        )

    given = [*items]
    around = (ctypes.c_void_p * (3 * len(items)))()
    around[len(items) : 2 * len(items)] = [id(one) for one in items]
    layout = Layout.from_address(id(given))
    own = layout.items, layout.room
    layout.items, layout.room = ctypes.addressof(around) + ctypes.sizeof(around) // 3, len(items)
    try:
        yield given
    finally:
        layout.items, layout.room = own


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 100])
def test_no_key_is_prefetched_that_is_not_in_the_list(compiled: Loops, count: int) -> None:
    """In a process of its own, which ends where one is."""
    keys = [hashlib.sha256(bytes([number])).digest()[:KEY_BYTES] for number in range(count)]

    def look() -> None:
        parts: list[dict[bytes, object]] = [{} for _ in range(8)]
        with between_nothing(keys) as given:
            compiled.put_by_key(parts, given, [State.READY] * count)
            compiled.values_in(tuple(parts), given, None)
            compiled.find([{}], given, [], 0, State.READY, False)
            compiled.drop_by_key(parts, given)

    process = multiprocessing.get_context("fork").Process(target=look)
    process.start()
    process.join()
    assert process.exitcode == 0


@given(
    tables=st.lists(st.dictionaries(st.sampled_from(SOME_KEYS), st.integers()), max_size=3),
    keys=st.lists(st.sampled_from(SOME_KEYS), unique=True),
)
def test_the_same_is_put_into_dicts_and_found_and_dropped_there(
    compiled: Loops, tables: list[dict[bytes, object]], keys: list[bytes]
) -> None:
    values = compiled.values_in(tuple(tables), keys, "other")
    assert values == PYTHON.values_in(tuple(tables), keys, "other")
    assert values == [next((one[key] for one in tables if key in one), "other") for key in keys]
    for before in tables:
        found = []
        for these in (PYTHON, compiled):
            table = dict(before)
            others = these.put_new(table, keys, "new")
            assert others == [key for key in keys if key in before]
            assert table == dict.fromkeys(keys, "new") | before
            order = list(table)
            these.drop_known(table, keys[1:])
            assert table.keys() == before.keys() - {*keys[1:]} | {*keys[:1]}
            found.append((order, table))
        assert found[0] == found[1]


@given(given_columns=columns())
def test_the_same_fields_are_put(compiled: Loops, given_columns: list[Column | None]) -> None:
    some_columns = [one for one in given_columns if one is not None]
    values = [object() for _ in some_columns]
    for these in (PYTHON, compiled):
        these.put(some_columns, "mark", these)
        assert [one.mark for one in some_columns] == [these] * len(some_columns)
        these.put_each(some_columns, "mark", values)
        assert [one.mark for one in some_columns] == values
        with pytest.raises(ValueError, match="as many values as columns"):
            these.put_each(some_columns, "mark", [*values, 1])
        assert [one.mark for one in some_columns] == values


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**70, "1", None, True, Running(lambda: None)])
def test_only_numbers_that_fit_are_put(compiled: Loops, wrong: Any, *, is_compact: bool) -> None:
    one = column(World().map, 1)
    for fits in (2**31 - 1, -(2**31)):
        compiled.put([one], "slot", fits)
        assert one.slot == fits
    if is_compact:
        with pytest.raises(TypeError, match="slot is an int of 32 bits"):
            compiled.put([one], "slot", wrong)
        assert one.slot == fits


def test_uses_stay_where_they_can_t_be_more(compiled: Loops, *, is_compact: bool) -> None:
    one = column(World().map, 1)
    one.uses = 2**31 - 1
    compiled.stamp([one], NOW)
    assert one.uses == 2**31 - is_compact


@pytest.mark.parametrize("number", [-1, 0, 1, 5])
def test_copies_have_the_fields_of_a_column_and_no_others(compiled: Loops, number: int) -> None:
    one = column(World().map, 1)
    one.mark = object()
    for these in (PYTHON, compiled):
        made = these.copies(one, ("mark", "map", "slot"), number)
        assert len(made) == max(0, number)
        for copy in made:
            assert type(copy) is type(one)
            assert (copy.mark, copy.map, copy.slot) == (one.mark, one.map, one.slot)
            assert not hasattr(copy, "key")


def test_what_is_dropped_while_a_field_is_put_may_take_the_columns_away(compiled: Loops) -> None:
    """Code of others runs when the value before is dropped."""

    class Emptying:
        def __del__(self) -> None:
            some.clear()

    for these in (PYTHON, compiled):
        some = [column(World().map, number) for number in range(5)]
        first = some[0]
        some[1].mark = Emptying()
        these.put(some, "mark", 7)
        assert (some, first.mark) == ([], 7)


class Other:
    """Has a field that is a slot of another class."""

    __slots__ = ()
    slot = PlainFields.__dict__["slot"]


class Name(str):
    """To look it up runs code of its own."""

    __slots__ = ()

    def __hash__(self) -> int:
        return str.__hash__(self)


class OwnWay:
    """Makes its objects itself."""

    __slots__ = ("slot",)
    slot: int

    def __new__(cls) -> Self:
        return object.__new__(cls)


@given(given_columns=columns())
def test_values_and_stamps_are_the_same(compiled: Loops, given_columns: list[Column | None]) -> None:
    some_columns = [one for one in given_columns if one is not None]
    for name in ("slot", "terms", "key", "uses"):
        assert compiled.values_of(some_columns, name) == PYTHON.values_of(some_columns, name)
        assert compiled.runs_of(some_columns, name) == PYTHON.runs_of(some_columns, name)
        assert compiled.runs_of(some_columns, name) == [
            value for value, _ in groupby(getattr(one, name) for one in some_columns)
        ]
    for name in ("slot", "uses"):
        numbers = array("i", [getattr(one, name) for one in some_columns])
        assert compiled.numbers_of(some_columns, name) == numbers
        assert PYTHON.numbers_of(some_columns, name) == numbers
    uses = [one.uses for one in some_columns]
    compiled.stamp(some_columns, NOW + 1)
    assert [(one.used_at, one.uses) for one in some_columns] == [(NOW + 1, n + 1) for n in uses]
    PYTHON.stamp(some_columns, NOW + 2)
    assert [(one.used_at, one.uses) for one in some_columns] == [(NOW + 2, n + 2) for n in uses]


@given(data=st.data(), names=st.sampled_from([(), ("uses",), ("uses", "terms"), ("mark", "uses")]))
def test_the_same_are_alike(compiled: Loops, data: st.DataObject, names: tuple[str, ...]) -> None:
    world = World()
    some = [column(world.map, number) for number in range(data.draw(st.integers(0, 5)))]
    if data.draw(st.booleans()) and some:
        some[-1] = world.map.add_tail(bytes(16), None, 5, 5, b"")
    for one in some:
        one.uses = data.draw(st.sampled_from([0] * 8 + [1])) or int("1000")  # an object each
        one.mark = data.draw(st.sampled_from([None] * 8 + ["again"]))
        one.terms = terms_of(data.draw(st.sampled_from([0] * 8 + [1])), 0)
    kinds = {(type(one), *[getattr(one, name) for name in names]) for one in some}
    assert compiled.alike(some, names) is PYTHON.alike(some, names) is (len(kinds) <= 1)


KEYS = [bytes([number]) * 16 for number in range(12)]
OF_KEYS = st.lists(st.sampled_from(KEYS), max_size=15)


@st.composite
def forests(draw: st.DrawFn) -> tuple[PrefixMap, list[Column]]:
    """Columns with any parents, some of which are not found any more; and those of one path."""
    prefix_map = PrefixMap(Account("acme", 1), NAMESPACE, 0, 4096, linked=draw(st.booleans()))
    made: list[Column] = []
    for key in draw(st.permutations(KEYS)):
        if not draw(st.integers(0, 5)):
            continue
        parent = draw(st.sampled_from([None, *made[-1:] * 4, *made]))
        depth = parent.depth + 1 if parent else draw(st.sampled_from([0, 0, 0, len(made)]))
        one = prefix_map.add(key, parent, depth)
        one.state = draw(st.sampled_from([State.READY] * 8 + [*State]))
        made.append(one)
    for one in made:
        if one.state is not State.READY and draw(st.booleans()):
            prefix_map.detach(one)  # what is behind it goes on having it as its parent
            if draw(st.booleans()):
                prefix_map.add(one.key, None, one.depth).state = State.READY
    return prefix_map, made


def find(these: Loops, known: Sequence[Column | None], count: int, *asked: Any) -> tuple[Any, int]:
    """What is found, where the first of these were known; and how many are in their places."""
    parts, keys, linked = asked
    found = list(known)
    count = these.find(parts, keys, found, count, State.READY, linked)
    return found, count


def to_root(column: Column | None) -> list[Column]:
    """This column and those before it, the first one first."""
    return [*to_root(column.parent), column] if column else []


@given(data=st.data())
def test_columns_are_found(compiled: Loops, data: st.DataObject) -> None:
    """In an order that a prompt may have, in any other, and after some were found before."""
    prefix_map, made = data.draw(forests())
    path = to_root(data.draw(st.sampled_from([None, *made])))
    keys = data.draw(st.one_of(st.just([one.key for one in path] + KEYS[:3]), OF_KEYS))
    if data.draw(st.booleans()):
        others = [bytes([0, 0, one % 256, one // 256]) for one in range(2000)]
        prefix_map.columns.put(others, [column(World().map, 1)] * len(others))
        assert len(prefix_map.columns.parts) > 1
    parts, linked = prefix_map.columns.parts, prefix_map.linked
    plain = [prefix_map.columns.get(key) for key in keys]
    found, count = find(compiled, [], 0, parts, keys, linked)
    assert (found, count) == find(PYTHON, [], 0, parts, keys, linked)
    assert found == plain, "they are those of the table"
    if linked:
        assert [one and one.parent for one in found[:count]] == [None, *found][:count]
    else:
        assert [one and one.depth for one in found[:count]] == list(range(count))
    states = [one and one.state for one in found[:count]] + [None]
    ready = next(at for at, state in enumerate(states) if state is not State.READY)
    still = data.draw(st.integers(0, ready))
    known = found[: data.draw(st.integers(still, len(found)))]
    for these in (PYTHON, compiled):
        assert find(these, known, still, parts, keys, linked) == (found, count)
        less = find(these, known, still, parts, keys[:still], linked)
        assert less == (found[:still], still)


TIMES = [float(number) for number in (1000, 2000)]  # one object each


@given(data=st.data(), most=st.integers(-1, 14))
def test_a_line_leads_to_its_column(compiled: Loops, data: st.DataObject, most: int) -> None:
    _, made = data.draw(forests())
    for one in made:
        one.used_at = data.draw(st.sampled_from([*TIMES[:1] * 8, *TIMES]))
        one.uses = data.draw(st.sampled_from([0] * 8 + [1])) or int("1000")  # an object each
        one.ref_count += not data.draw(st.integers(0, 8))  # a pin
    for one in made:
        line = compiled.line_to(one, ("used_at", "uses"), most)
        assert line == PYTHON.line_to(one, ("used_at", "uses"), most)
        assert line[0] is one
        assert len(line) <= max(1, most)
        assert line[1:] == [behind.parent for behind in line[:-1]]
        assert {(each.used_at, each.uses) for each in line} == {(one.used_at, one.uses)}
        assert {each.ref_count for each in line[1:]} <= {1}
        before = line[-1].parent
        assert len(line) >= most or not (
            before and before.ref_count == 1 and (before.used_at, before.uses) == (one.used_at, one.uses)
        )


def test_a_line_to_a_tail_is_the_tail(compiled: Loops) -> None:
    prefix_map = PrefixMap(Account("acme", 1), NAMESPACE, 0, 4096, linked=True)
    first = prefix_map.add(KEYS[0], None, 0)
    tail = prefix_map.add_tail(KEYS[1], first, 1, 5, KEYS[0])
    for these in (PYTHON, compiled):
        assert these.line_to(tail, ("used_at",), 5) == [tail]


@pytest.mark.parametrize(
    "make",
    [
        lambda depth: MiniatureColumn(Reference(KEYS[depth], depth, False), None),
        lambda depth: CompetingColumn(ForestColumn(KEYS[depth], needs=depth), None, NOW),
        lambda depth: BenchmarkColumn(KEYS[depth], None, NOW, NOW, depth, False, 1, depth),
        lambda depth: ForestColumn(KEYS[depth], needs=depth),
    ],
    ids=["of a preview", "of a competition", "of a benchmark", "of tests"],
)
def test_any_column_that_a_policy_may_have_is_displaced_in_runs(
    compiled: Loops, make: Callable[[int], Any]
) -> None:
    for these in (PYTHON, compiled):
        with loops_in_use(these):
            policy, made = Cost[Any](), [make(depth) for depth in range(1, 5)]
            for one, behind in pairwise(made):
                behind.parent, one.ref_count = one, 1
            for one in made:
                policy.stored(one, NOW)
            assert policy.victims(NOW, 10) == made[::-1]


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("state", [one for one in State if one is not State.READY])
def test_a_column_that_was_detached_is_not_found_by_the_one_behind_it(
    compiled: Loops, state: State, *, is_replaced: bool
) -> None:
    prefix_map = PrefixMap(Account("acme", 1), NAMESPACE, 0, 4096, linked=True)
    first = prefix_map.add(KEYS[0], None, 0)
    detached, last = prefix_map.add_behind(first, KEYS[1:3], [0, 1], terms_of(0, 0))
    first.state, detached.state, last.state = State.READY, state, State.READY
    prefix_map.detach(detached)
    instead = prefix_map.add(KEYS[1], first, 1) if is_replaced else None
    for these in (PYTHON, compiled):
        found = find(these, [], 0, prefix_map.columns.parts, KEYS[:3], True)
        assert found == ([first, instead, last], 1 + is_replaced)


# What a look-up checks


def _nothing(made: Ledger, asked: Prompt) -> None:
    """All of it can be served."""


def _column(made: Ledger, asked: Prompt) -> Column:
    """The third of five."""
    found = made._stock.maps_of(asked.maker)[0].columns[asked.keys[2]]
    assert found.state is State.READY
    return found


def _refuse(made: Ledger, asked: Prompt) -> None:
    made.refuse(_column(made, asked), Reason.SEAL_REFUSED)


def _write(made: Ledger, asked: Prompt) -> None:
    _refuse(made, asked)
    made.begin_store(prompt(conversation(1, 2, 3, 4, 5)), 5 * C, 5)


def _cut_off(made: Ledger, asked: Prompt) -> None:
    made.is_reachable = False


def _use_policy(**fields: Any) -> Callable[[Ledger, Prompt], None]:
    def use(made: Ledger, asked: Prompt) -> None:
        made.set_policies({"acme": OrgPolicies(policy=Policy(**fields))}, 5)

    return use


CHECKED: dict[str, tuple[Callable[[Ledger, Prompt], object], int]] = {
    "all can be served": (_nothing, 5),
    "a TTL since it was stored": (_use_policy(ttl_first_use_seconds=10, ttl_last_use_seconds=None), 0),
    "a TTL since it was used": (_use_policy(ttl_last_use_seconds=8), 0),
    "a TTL of its own": (lambda made, asked: made.set_ttl(asked, 8, range(2, 3)), 2),
    "a policy that stores nothing": (_use_policy(tiers=Tiers.NONE), 0),
    "a policy that stores the beginning": (_use_policy(store_tokens_max=2 * C), 2),
    "bytes that were refused": (_refuse, 2),
    "bytes that are on their way": (_write, 2),
    "an agent that is lost": (_cut_off, 0),
    "a purge of the org": (lambda made, asked: made.purge(asked.org, now=5), 0),
    "a purge of the namespace": (lambda made, asked: made.purge(asked.org, NAMESPACE, now=5), 0),
    "a purge of the tag": (lambda made, asked: made.purge_tag(asked.org, asked.maker.tag), 0),
    "a deleted end": (lambda made, asked: made.delete(asked), 0),
}


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("what", CHECKED)
def test_a_look_up_checks_each_column(compiled: Loops, what: str, *, is_known: bool) -> None:
    """Whether it is found by its key, by the one behind it, or in what the prompt was found to have."""
    happens, columns = CHECKED[what]
    for these in (PYTHON, compiled):
        with loops_in_use(these):
            made = ledger(40, acme=Policy(ttl_last_use_seconds=None))
            asked = prompt(conversation(1, 2, 3, 4, 5))
            store(made, asked)
            assert made.query(asked, 4) == 5 * C
            if is_known:
                made.release(made.match(asked, 4))
            happens(made, asked)
            if not is_known:
                asked = prompt(conversation(1, 2, 3, 4, 5))
            asked.extend(conversation(6, rest=1))
            match = made.match(asked, 14)
            assert match.tokens == columns * C
            assert [[one.key for one in hit] for hit in match.columns] == [asked.keys[:columns]]


@pytest.mark.parametrize("org", ["acme", "globex"])
@pytest.mark.parametrize("namespace", [NAMESPACE, OTHER], ids=["own", "other"])
def test_a_look_up_finds_what_is_of_its_org_and_namespace(
    compiled: Loops, org: str, namespace: Namespace
) -> None:
    for these in (PYTHON, compiled):
        with loops_in_use(these):
            made = ledger(40)
            store(made, prompt(conversation(1, 2, 3), org, namespace))
            for other in ("acme", "globex"):
                for one in (NAMESPACE, OTHER):
                    asked = prompt(conversation(1, 2, 3), other, one)
                    found = made.query(asked, 1)
                    assert found == (3 * C if (other, one) == (org, namespace) else 0)


def test_a_map_and_its_columns_are_freed() -> None:
    """They refer to each other."""
    world = World()
    column(world.map, 1)
    known = weakref.ref(world.map)
    del world
    gc.collect()
    assert known() is None


def test_nothing_is_leaked_and_nothing_let_go_of(compiled: Loops) -> None:
    world = World()
    one = column(world.map, 1)
    two = world.map.add((2).to_bytes(16, "big"), None, 1)
    two.parent = one
    one.state, one.stored_at = State.READY, 123.5
    table = array("Q", bytes(32))
    short = column(world.map, 3)
    short.key = bytes([3])
    counted = [one, two, table, one.key, two.key, one.stored_at, one.terms, State.READY]
    counted += [short.key, type(one)]
    gc.collect()  # columns of other tests have that state, too
    before = [sys.getrefcount(each) for each in counted]
    for _ in range(50):
        parts = world.map.columns.parts
        compiled.find(parts, [one.key, two.key], [one], 1, State.READY, True)
        compiled.find(parts, [one.key, two.key, bytes(16)], [], 0, State.READY, True)
        with pytest.raises(TypeError):  # after one was found
            compiled.find(parts, ["no key", two.key], [], 0, State.READY, False)  # type: ignore[list-item]
        compiled.runs_of([one, two], "key")
        compiled.fresh([one], 0, State.READY, 0.0, -1.0, NOW)
        compiled.values_of([one], "key")
        assert compiled.alike([one, two], ("terms", "map"))
        assert not compiled.alike([one, two], ("key",))
        compiled.numbers_of([one, two], "slot")
        with pytest.raises(TypeError):
            compiled.numbers_of([one, two], "key")
        compiled.sampled([one], 0)
        with pytest.raises(TypeError):
            compiled.sampled([short], 0)
        one.used_at = 0.0
        compiled.stamp([one], NOW)
        compiled.put([one, two], "mark", one.terms)
        compiled.put_each([one, two], "mark", [two.key, one.key])
        compiled.put([one, two], "mark", None)
        compiled.copies(one, ("key", "terms", "state", "stored_at", "parent"), 3)
        with pytest.raises(AttributeError):
            compiled.copies(compiled.copies(one, ("key",), 1)[0], ("key", "terms"), 1)
        compiled.put_by_key([{}], [one.key, two.key], [one, two])
        compiled.put_by_key(world.map.columns.parts, [one.key], [one])
        compiled.drop_by_key([{one.key: one}], [one.key])
        with pytest.raises(KeyError):
            compiled.drop_by_key([{one.key: one}], [one.key, two.key])
        with pytest.raises(TypeError):
            compiled.drop_by_key([{one.key: one}], [one.key, None])  # type: ignore[list-item]
        others = {one.key: one}
        assert compiled.put_new(others, [one.key, two.key], two) == [one.key]
        assert compiled.values_in(({}, others), [two.key, bytes(16)], one) == [two, one]
        with pytest.raises(TypeError):  # after one was found
            compiled.values_in((others,), [two.key, None], one)  # type: ignore[list-item]
        with pytest.raises(TypeError):
            compiled.put_new(others, [one.key, []], two)
        compiled.drop_known(others, [two.key, bytes(16)])
        assert others == {one.key: one}
        del others
        compiled.note([one.key, two.key], table)
        assert compiled.noted([one.key, two.key], table) == [False, True]  # of one slot
        with pytest.raises(TypeError):  # and the table can grow afterwards
            compiled.noted([one.key, b"no key"], table)
        with pytest.raises(TypeError):
            compiled.note([two.key, None], table)  # type: ignore[list-item]
        table.append(table.pop())
        one.ref_count = 1
        assert len(compiled.line_to(two, ("map", "terms"), 3)) == 2
        one.ref_count = "1"  # type: ignore[assignment]
        with pytest.raises(TypeError):
            compiled.line_to(two, ("map", "terms"), 3)
        compiled.packed([1000] * 10)
        compiled.chained(bytes(64), bytes(32), bytes(512), 64)
    assert [sys.getrefcount(each) for each in counted] == before


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.find([{}], ["text"], [], 0, State.READY, False),
        lambda one: one.find([{}], [b"no"], [], 0, State.READY, False),
        lambda one: one.find({}, [], [], 0, State.READY, False),
        lambda one: one.find([], [bytes(16)], [], 0, State.READY, False),
        lambda one: one.find([[]], [bytes(16)], [], 0, State.READY, False),
        lambda one: one.find([{}], (), [], 0, State.READY, False),
        lambda one: one.find([{}], [], (), 0, State.READY, False),
        lambda one: one.find([{}], [bytes(16)], [], "1", State.READY, False),
        lambda one: one.find([{bytes(16): object()}], [bytes(16)], [], 0, State.READY, False),
        lambda one: one.find(
            [{bytes(16): object.__new__(Strange)}], [bytes(16)] * 2, [], 0, State.READY, True
        ),
        lambda one: one.fresh([object()], 0, State.READY, 0.0, 0.0, 0.0),
        lambda one: one.fresh((), 0, State.READY, 0.0, 0.0, 0.0),
        lambda one: one.fresh([], 0, State.READY, "early", 0.0, 0.0),
        lambda one: one.numbers_of([object()], "slot"),
        lambda one: one.numbers_of([column(World().map, 1)], "key"),
        lambda one: one.numbers_of((), "slot"),
        lambda one: one.values_of([object()], "slot"),
        lambda one: one.values_of([column(World().map, 1)], "no such field"),
        lambda one: one.values_of([column(World().map, 1)], "group"),
        lambda one: one.values_of([Other()] * 3, "slot"),
        lambda one: one.runs_of([object()], "slot"),
        lambda one: one.runs_of([None], "slot"),
        lambda one: one.runs_of([], None),
        lambda one: one.runs_of([column(World().map, 1)], Name("slot")),
        lambda one: one.copies(column(World().map, 1), (Name("slot"),), 1),
        lambda one: one.put([object()], "slot", 1),
        lambda one: one.put([Other()] * 3, "slot", 1),
        lambda one: one.put((), "slot", 1),
        lambda one: one.put([], None, 1),
        lambda one: one.put_each([None], "slot", [1]),
        lambda one: one.put_each([column(World().map, 1)], "slot", (1,)),
        lambda one: one.copies(object(), ("slot",), 1),
        lambda one: one.copies(column(World().map, 1), ["slot"], 1),
        lambda one: one.copies(column(World().map, 1), ("slot",) * 33, 1),
        lambda one: one.copies(column(World().map, 1), ("slot",), "1"),
        lambda one: one.copies(column(World().map, 1), (1,), 1),
        lambda one: one.copies(OwnWay(), ("slot",), 1),
        lambda one: one.alike((), ("slot",)),
        lambda one: one.alike([object()], ("slot",)),
        lambda one: one.alike([Other()], ("slot",)),
        lambda one: one.alike([], ["slot"]),
        lambda one: one.alike([], ("slot",) * 33),
        lambda one: one.line_to(object(), ("slot",), 1),
        lambda one: one.line_to(column(World().map, 1), ["slot"], 1),
        lambda one: one.line_to(column(World().map, 1), ("slot",) * 33, 1),
        lambda one: one.line_to(column(World().map, 1), ("slot",), "1"),
        lambda one: one.line_to(column(World().map, 1), ("group",), 1),
        lambda one: one.line_to(object.__new__(Strange), ("slot",), 1),
        lambda one: one.put_by_key([], [bytes(16)], [1]),
        lambda one: one.put_by_key([None], [bytes(16)], [1]),
        lambda one: one.put_by_key([{}], [b"no"], [1]),
        lambda one: one.put_by_key([{}], ["text"], [1]),
        lambda one: one.put_by_key({}, [bytes(16)], [1]),
        lambda one: one.drop_by_key([{}], (bytes(16),)),
        lambda one: one.put_new([], [1], None),
        lambda one: one.put_new({}, (1,), None),
        lambda one: one.put_new({}, [[]], None),
        lambda one: one.drop_known([], [1]),
        lambda one: one.drop_known({}, (1,)),
        lambda one: one.drop_known({}, [[]]),
        lambda one: one.values_in([{}], [bytes(16)], None),
        lambda one: one.values_in(([],), [bytes(16)], None),
        lambda one: one.values_in(({},), (bytes(16),), None),
        lambda one: one.values_in(({},), ["text"], None),
        lambda one: one.note([b"short"], array("Q", [0])),
        lambda one: one.note([], array("I", [0, 0])),
        lambda one: one.note([], array("Q")),
        lambda one: one.note((), array("Q", [0])),
        lambda one: one.noted([None], array("Q", [0])),
        lambda one: one.noted([], [0]),
        lambda one: one.packed(""),
        lambda one: one.sampled([object()], 1),
        lambda one: one.sampled(None, 1),
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
    with loops_in_use(loops.current):
        loops._FOLLOWER.use_mover(mover)
        assert loops.current.find is mover.find
        loops._FOLLOWER.use_mover(PYTHON_MOVER)
        assert loops.current is PYTHON
