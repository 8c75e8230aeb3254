"""Columns by their keys, however many there are: none of what is done at once takes long."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from swdriver_shim import loops
from swdriver_shim.cache import column_table, expiry
from swdriver_shim.cache.column_table import PARTS, PIECE, WHOLE_MAX, ColumnTable
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.kinds_of_loops import kinds_of_loops, loops_in_use
from tests.swdriver_shim.ledgers import conversation, ledger, store
from tests.swdriver_shim.prompts import prompt

MANY = 20 * WHOLE_MAX
KEYS = [random.Random(number).randbytes(16) for number in range(MANY)]


@pytest.mark.parametrize("kind", [*kinds_of_loops()])
def test_a_table_has_what_a_dict_would_have(kind: str) -> None:
    table, expected, numbers = ColumnTable[object](), dict[bytes, object](), random.Random(7)
    with loops_in_use(kinds_of_loops()[kind]):
        assert not table
        for turn in range(40):
            keys = numbers.sample(KEYS, numbers.choice([1, 30, WHOLE_MAX // 2]))
            columns = [object() for _ in keys]
            table.put(keys, columns)
            expected |= dict(zip(keys, columns, strict=True))
            dropped = numbers.sample([*expected], len(expected) // 4)
            table.drop(dropped)
            for key in dropped:
                del expected[key]
            if turn % 5 == 0:
                key = next(iter(expected))
                assert table[key] is expected.pop(key)
                del table[key]
                assert key not in table
                table[key] = expected[key] = object()
            assert len(table) == len(expected)
            assert {*table.values()} == {*expected.values()}
            assert all(table.get(key) is expected.get(key) for key in KEYS[:: 1 + turn])
        assert len(table.parts) == PARTS
        taken = table.take(100)
        assert len(taken) == 100
        assert {*taken} | {*table.values()} == {*expected.values()}
        assert len(table) == len(expected) - 100
        assert len(table.take(MANY)) == len(expected) - 100
        assert not table


def test_many_columns_are_in_parts_that_are_alike() -> None:
    table = ColumnTable[bytes]()
    table.put(KEYS[:WHOLE_MAX], KEYS[:WHOLE_MAX])
    assert len(table.parts) == 1
    table.put(KEYS, KEYS)
    assert len(table.parts) == PARTS
    assert max(map(len, table.parts)) < 2 * MANY / PARTS
    pieces = [*table.pieces()]
    assert sorted(key for piece in pieces for key in piece) == sorted(KEYS)
    assert {*map(len, pieces[:-1])} == {PIECE}


def test_who_looks_without_the_lock_finds_all_of_a_table_that_is_being_divided() -> None:
    """As a cache map does, in a thread of its own."""
    table = ColumnTable[bytes]()
    table.put(KEYS[:WHOLE_MAX], KEYS[:WHOLE_MAX])
    are_found: list[bool] = []

    def put(parts: list[dict[bytes, Any]], keys: list[bytes], columns: list[Any]) -> None:
        for key, column in zip(keys, columns, strict=True):
            are_found.append(all(table.get(one) is one for one in KEYS[:WHOLE_MAX:64]))
            loops.put_by_key(parts, [key], [column])

    with loops_in_use(replace(loops.PYTHON, put_by_key=put)):
        table.put(KEYS[WHOLE_MAX:][:1], KEYS[WHOLE_MAX:][:1])
    assert len(table.parts) == PARTS
    assert len(are_found) == WHOLE_MAX + 1
    assert all(are_found)


def test_who_stays_is_listed_whatever_comes_and_goes_meanwhile() -> None:
    table, numbers = ColumnTable[bytes](), random.Random(7)
    table.put(KEYS[:600], KEYS[:600])
    staying, listed = {*KEYS[:300]}, list[bytes]()
    for piece in table.pieces():
        listed += piece
        table.drop(KEYS[300:600])
        table.put(KEYS[600:], KEYS[600:])  # it is divided
        for other in table.pieces():
            listed += other
            gone = numbers.sample([key for key in table.values() if key not in staying], 900)
            table.drop(gone)
            table.put(gone[::2], gone[::2])
        assert staying <= {*listed}
        table.drop([key for key in [*table.values()] if key not in staying])
        table.put(KEYS[300:600], KEYS[300:600])
    assert staying <= {*listed}


LISTED_MAX = 2 * 20  # where pieces are of 20


def lists_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns each list has that a table makes from now on."""
    sizes, pieces = list[int](), ColumnTable.pieces

    def counted(table: ColumnTable[Column]) -> object:
        for piece in pieces(table):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(ColumnTable, "pieces", counted)
    monkeypatch.setattr(column_table, "PIECE", 20)
    monkeypatch.setattr(column_table, "WHOLE_MAX", 50)
    return sizes


def test_another_ttl_reaches_all_columns_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = lists_of(monkeypatch)
    made = ledger(2000, acme=Policy(ttl_last_use_seconds=1000))
    store(made, prompt(conversation(*range(2000)), "acme"), 0)
    made.set_policies({"acme": OrgPolicies(policy=Policy(ttl_last_use_seconds=100))}, 1)
    assert listed == [], "none is listed under the lock of who changes it"
    while made.sweep(1, columns=21):
        done = sum(column.due == 100 for column in made.accounts["acme"].columns(0))
        assert sum(listed) - done < LISTED_MAX
    assert sum(listed) == 2000
    assert {column.due for column in made.accounts["acme"].columns(0)} == {100}
    while made.sweep(100):
        pass
    assert not [*made.accounts["acme"].columns(0)]
    check_integrity(made)


def test_columns_forget_what_is_not_in_tier_2_any_more_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = lists_of(monkeypatch)
    made = ledger(2000, acme=Policy(tiers=Tiers.TIER2))
    store(made, prompt(conversation(*range(2000)), "acme"), 0)
    account = made.accounts["acme"]
    for column in account.columns(0):
        column.tier2_used_at = 0.0
    made.set_policies({"acme": OrgPolicies(policy=Policy(tiers=Tiers.DRAM))}, 1)
    made._stock.expiry.catch_up(5000)
    listed.clear()
    for turn in range(1, 4):
        assert made._stock.forget_tier2()
        assert len(listed) == turn
    left = made.snapshot(1, 1)
    assert sum(listed) == 2000
    assert max(listed) < LISTED_MAX
    assert {column.tier2_used_at for column in account.columns(0)} == {None}
    assert {one.tier2_used_at for one in left.columns} == {None}


def test_many_columns_of_one_second_are_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that come to the same second by another TTL, or are restored together."""
    monkeypatch.setattr(expiry, "PART_MAX", 20)
    made = ledger(2000, acme=Policy(ttl_last_use_seconds=50))
    for number in range(0, 2000, 10):
        store(made, prompt(conversation(*range(number, number + 10)), "acme"), 0)
    parts = made._stock.expiry._due[50]
    assert max(map(len, parts)) < 20 + 10
    assert sum(map(len, parts)) == 2000
    for _ in range(2):
        match = made.match(prompt(conversation(*range(500, 510)), "acme"), 10)
        made.release(match)
    for column in match.columns[0]:
        made._stock.expiry.schedule(column)
    assert sum(map(len, parts)) == 1990
    assert not made.sweep(49)
    while made.sweep(50):
        pass
    assert {*made.accounts["acme"].columns(0)} == {*match.columns[0]}
    assert {column.due for column in match.columns[0]} == {60}
    while made.sweep(60):
        pass
    assert not [*made.accounts["acme"].columns(0)]
    assert not made._stock.expiry._due
