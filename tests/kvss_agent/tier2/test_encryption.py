"""What lies in tier 2 of an org that wants it encrypted: nobody reads it without the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss, verify
from kvss_agent.tier2.encryption import Encrypted
from kvss_agent.tier2.store import Outcome
from tests.kvss_agent.tier2.columns import (
    ACME,
    BOLT,
    address_of,
    evicted,
    files_in,
    holds,
    new_slot,
    opened,
    recall,
    spill,
)

KEY, OTHER = b"k" * 32, b"o" * 32


async def test_an_encrypted_column_comes_back_with_its_key_only(tmp_path: Path) -> None:
    address = address_of(1)
    async with opened(tmp_path) as store:
        slot, column = evicted(address, sequence=7, tokens=40)
        assert await spill(store, address, slot, column, 99, Encrypted(KEY)) is Outcome.STORED
        found = await recall(store, address, into := new_slot(), 12, Encrypted(KEY))
        assert isinstance(found, Header)
        assert (found.sequence, found.tokens) == (99, 40)
        assert isinstance(verify(into, Column(address.key, address.tag, 12)), Header)
        assert holds(into, address, 12)
        [file] = files_in(tmp_path)
        payload = bytes(slot[HEADER_BYTES : HEADER_BYTES + found.length])
        raw = file.read_bytes()
        assert not any(payload[at : at + 32] in raw for at in range(0, len(payload) - 32, 997))
        assert store.stats().bytes == len(raw)
    async with opened(tmp_path) as store:
        assert await recall(store, address, new_slot(), 12, Encrypted(OTHER)) is Miss.CORRUPT
        assert files_in(tmp_path) == [], "nobody can read it any more"


async def test_the_same_column_never_makes_the_same_file(tmp_path: Path) -> None:
    address = address_of(1)
    async with opened(tmp_path) as store:
        slot, column = evicted(address)
        seen = set()
        for _ in range(3):
            await spill(store, address, slot, column, 0, Encrypted(KEY))
            [file] = files_in(tmp_path)
            seen.add(file.read_bytes()[HEADER_BYTES:])
            await store.delete([address])
        assert len(seen) == 3


@pytest.mark.parametrize("at", [8, HEADER_BYTES + 3, HEADER_BYTES + 16, HEADER_BYTES + 5000])
async def test_one_flipped_bit_is_a_miss_and_leaves_no_byte(tmp_path: Path, at: int) -> None:
    address = address_of(1)
    async with opened(tmp_path) as store:
        slot, column = evicted(address)
        await spill(store, address, slot, column, 0, Encrypted(KEY))
        [file] = files_in(tmp_path)
        raw = bytearray(file.read_bytes())
        raw[at] ^= 1
        file.write_bytes(raw)
        assert isinstance(await recall(store, address, into := new_slot(), 12, Encrypted(KEY)), Miss)
        assert not any(into[HEADER_BYTES:])


async def test_a_file_under_another_name_is_not_that_column(tmp_path: Path) -> None:
    mine, other = address_of(1, ACME), address_of(1, BOLT)
    async with opened(tmp_path) as store:
        for address in (mine, other):
            slot, column = evicted(address)
            await spill(store, address, slot, column, 0, Encrypted(KEY))
        source, target = (tmp_path / address.name for address in (mine, other))
        target.write_bytes(source.read_bytes())
        assert await recall(store, other, new_slot(), 12, Encrypted(KEY)) is Miss.FOREIGN


@pytest.mark.parametrize("first", ["encrypted", "clear"])
async def test_encrypted_and_in_the_clear_are_not_taken_for_each_other(
    tmp_path: Path, first: str
) -> None:
    address = address_of(1)
    async with opened(tmp_path) as store:
        slot, column = evicted(address)
        if first == "encrypted":
            await spill(store, address, slot, column, 0, Encrypted(KEY))
            assert await recall(store, address, new_slot(), 12) is Miss.STALE
        else:
            await spill(store, address, slot, column)
            assert await recall(store, address, new_slot(), 12, Encrypted(KEY)) is Miss.STALE


def test_a_key_of_another_length_is_refused_and_never_shown() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Encrypted(b"short")
    assert "k" * 4 not in repr(Encrypted(KEY))
