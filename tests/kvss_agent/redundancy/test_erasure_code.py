"""Any `data` fragments make all others."""

from __future__ import annotations

import itertools
import secrets

import pytest

from kvss_agent.redundancy.erasure_code import ErasureCode

CODES = [(1, 1), (1, 2), (2, 1), (4, 1), (4, 2), (8, 2), (3, 3), (8, 4)]
SIZE = 4096


def fragments(data: int, last: int = SIZE) -> list[memoryview]:
    sizes = [SIZE] * (data - 1) + [last if data > 1 else SIZE]
    return [memoryview(bytearray(secrets.token_bytes(size))) for size in sizes]


def encoded(code: ErasureCode, its: list[memoryview]) -> list[memoryview]:
    parity = [memoryview(bytearray(len(its[0]))) for _ in range(code.parity)]
    code.encode(its, parity)
    return its + parity


@pytest.mark.parametrize(("data", "parity"), CODES)
@pytest.mark.parametrize("last", [SIZE, SIZE - 640, 64])
def test_whatever_is_lost_is_made_of_the_rest(data: int, parity: int, last: int) -> None:
    code = ErasureCode(data, parity)
    its = encoded(code, fragments(data, last))
    for lost in itertools.islice(itertools.combinations(range(data + parity), parity), 60):
        there = {place: one for place, one in enumerate(its) if place not in lost}
        missing = {place: memoryview(bytearray(len(its[place]))) for place in lost}
        code.rebuild(there, missing)
        assert all(missing[place] == its[place] for place in lost), lost


def test_one_fragment_of_parity_is_xor() -> None:
    its = encoded(ErasureCode(4, 1), fragments(4))
    whole = 0
    for one in its:
        whole ^= int.from_bytes(one)
    assert whole == 0


def test_without_data_all_are_copies() -> None:
    its = encoded(ErasureCode(1, 2), fragments(1))
    assert its[0] == its[1] == its[2]


def test_too_few_make_nothing() -> None:
    code = ErasureCode(4, 1)
    its = encoded(code, fragments(4))
    with pytest.raises(ValueError, match="3 fragments"):
        code.rebuild(dict(enumerate(its[:3])), {3: its[3]})
