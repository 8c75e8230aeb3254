"""A slot goes into a file and comes back; what is damaged, misplaced or half there does not."""

from __future__ import annotations

import pytest

from kvss_agent.mover import PYTHON
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Header, Miss
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.column_file import CLEAR
from tests.kvss_agent.tier2.columns import ACME, BOLT, PAGE, address_of, evicted, new_slot, payload_of

LENGTHS = [1, 4031, 4032, 4033, 8128, 8129, 10_000, 4096 * 4 - 64]
ADDRESS = address_of(1)


def file_of(address: Address, length: int = 10_000, tokens: int = 64) -> bytearray:
    slot, column = evicted(address, length=length, tokens=tokens)
    header = seal.verify(slot, column)
    assert isinstance(header, Header)
    return bytearray(b"".join(CLEAR.outgoing(slot, header, address, 7)))


def read(
    file: bytes | bytearray, address: Address = ADDRESS, length: int = 10_000
) -> tuple[Header | Miss, memoryview]:
    slot = new_slot(length)
    landing = CLEAR.incoming(slot, address, PYTHON)
    received = 0
    for part in landing.parts:
        piece = file[received : received + len(part)]
        part[: len(piece)] = piece
        received += len(piece)
    return landing.accept(received), slot


@pytest.mark.parametrize("length", LENGTHS)
def test_a_column_comes_back_whole_with_its_token_count(length: int) -> None:
    file = file_of(ADDRESS, length, tokens=17)
    found, slot = read(file, length=length)
    assert isinstance(found, Header)
    assert (found.tokens, found.length, len(file)) == (17, length, slot_bytes_for(length))
    assert slot[HEADER_BYTES : HEADER_BYTES + length] == payload_of(ADDRESS, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_nothing_that_lay_in_the_slot_before_gets_into_the_file(length: int) -> None:
    file = file_of(ADDRESS, length)
    assert not any(file[HEADER_BYTES + length :])
    assert isinstance(seal.verify(memoryview(file), ADDRESS.column(7)), Header)


@pytest.mark.parametrize("slot_pages", [3, 4, 7])
def test_a_slot_may_be_larger_than_the_column(slot_pages: int) -> None:
    landing = CLEAR.incoming(new_slot(slot_pages * PAGE - HEADER_BYTES), ADDRESS, PYTHON)
    file = file_of(ADDRESS)
    first, rest = landing.parts
    first[:], rest[: len(file) - HEADER_BYTES] = file[:HEADER_BYTES], file[HEADER_BYTES:]
    assert isinstance(landing.accept(len(file)), Header)


@pytest.mark.parametrize("offset", [0, 4, 5, 6, 16, 40, 48, 56, 60, 64, 4095, 4096, 10_063])
def test_a_flipped_bit_is_a_miss(offset: int) -> None:
    file = file_of(ADDRESS)
    file[offset] ^= 4
    assert isinstance(read(file)[0], Miss)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4095, 4096, 8192, 12_287])
def test_half_a_file_is_torn(size: int) -> None:
    assert read(file_of(ADDRESS)[:size])[0] is Miss.TORN


def test_a_file_whose_blocks_never_reached_the_disk_is_torn() -> None:
    assert read(bytes(12_288))[0] is Miss.TORN


def test_a_file_of_another_version_is_corrupt() -> None:
    file = file_of(ADDRESS)
    file[4] = seal.VERSION + 1
    assert read(file)[0] is Miss.CORRUPT


def test_a_file_that_is_longer_than_its_column_is_corrupt() -> None:
    assert read(file_of(ADDRESS) + bytes(PAGE), length=20_000)[0] is Miss.CORRUPT


def test_a_column_that_does_not_fit_the_slot_is_corrupt() -> None:
    assert read(file_of(ADDRESS), length=4000)[0] is Miss.CORRUPT


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (address_of(1, BOLT), Miss.FOREIGN),
        (address_of(2), Miss.STALE),
        (address_of(1, ACME, shard="full-1"), Miss.STALE),
        (address_of(1, ACME, namespace=b"another-model..."), Miss.STALE),
    ],
)
def test_a_file_under_another_name_is_not_taken_for_that(other: Address, reason: Miss) -> None:
    assert read(file_of(other))[0] is reason
