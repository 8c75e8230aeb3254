"""A reader gets exactly the column it expects, or a reason: golden bytes, and every kind of damage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.mover import PIECE_BYTES, PYTHON
from kvss_agent.shard import seal
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss

COLUMN = Column(key=bytes(range(16)), tag=b"organisation-001", sequence=0x0102030405060708)
PAYLOAD = memoryview(bytes(range(256)) * 16)
GOLDEN = (
    "5449444501024000"  # magic, version 1, sealed, 64 tokens
    "0807060504030201"  # sequence
    "000102030405060708090a0b0c0d0e0f"
    "6f7267616e69736174696f6e2d303031"
    "51918707377c4beb"  # XXH3-64 of the payload
    "00100000"  # 4096 bytes
    "438f7bf2"  # XXH3-64 of all of the above, lower half
)


def slot_with(
    payload: memoryview = PAYLOAD, column: Column = COLUMN, tokens: int = 64, room: int = 8192
) -> memoryview:
    slot = memoryview(bytearray(room))
    seal.write(slot, column, tokens, payload)
    return slot


def test_the_layout_is_what_is_written_down() -> None:
    assert slot_with()[:HEADER_BYTES].hex() == GOLDEN


def test_what_was_written_comes_back_with_its_token_count() -> None:
    slot = slot_with(tokens=7)
    into = memoryview(bytearray(5000))
    found = seal.copy_out(slot, COLUMN, into)
    assert isinstance(found, Header)
    assert (found.tokens, found.length) == (7, len(PAYLOAD))
    assert into[: found.length] == PAYLOAD
    assert seal.verify(slot, COLUMN) == found


@pytest.mark.parametrize("length", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_pieces_make_no_difference(length: int) -> None:
    payload = memoryview((bytes(range(251)) * (length // 251 + 1))[:length])
    slot = slot_with(payload, room=length + HEADER_BYTES)
    assert isinstance(seal.verify(slot, COLUMN), Header)
    assert isinstance(seal.copy_out(slot, COLUMN, memoryview(bytearray(length))), Header)


def test_an_empty_slot_is_absent() -> None:
    assert seal.verify(memoryview(bytearray(4096)), COLUMN) is Miss.ABSENT


def test_a_slot_whose_writer_died_is_torn() -> None:
    slot = slot_with()
    seal.open_slot(slot, COLUMN.sequence + 1)
    slot[100:110] = b"0123456789"
    assert seal.verify(slot, COLUMN) is Miss.TORN


def test_another_evict_of_the_same_column_is_stale_and_so_is_another_column() -> None:
    slot = slot_with()
    assert seal.verify(slot, Column(COLUMN.key, COLUMN.tag, COLUMN.sequence + 1)) is Miss.STALE
    assert seal.verify(slot, Column(bytes(16), COLUMN.tag, COLUMN.sequence)) is Miss.STALE


def test_a_column_of_another_tag_is_foreign_whatever_else_fits() -> None:
    assert seal.verify(slot_with(), Column(COLUMN.key, bytes(16), COLUMN.sequence)) is Miss.FOREIGN


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1), st.integers(0, 7))
def test_no_single_flipped_bit_goes_unnoticed(offset: int, bit: int) -> None:
    slot = slot_with()
    slot[offset] ^= 1 << bit
    assert isinstance(seal.verify(slot, COLUMN), Miss)
    assert isinstance(seal.copy_out(slot, COLUMN, memoryview(bytearray(8192))), Miss)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_never_a_header(noise: bytes) -> None:
    assert isinstance(seal.read(noise), Miss)


def test_a_header_of_another_version_is_corrupt_and_not_misread() -> None:
    slot = slot_with()
    slot[4] = seal.VERSION + 1
    assert seal.verify(slot, COLUMN) is Miss.CORRUPT


def test_a_length_beyond_the_slot_is_corrupt() -> None:
    slot = slot_with()
    assert seal.verify(slot[:1000], COLUMN) is Miss.CORRUPT
    assert seal.copy_out(slot[:1000], COLUMN, memoryview(bytearray(8192))) is Miss.CORRUPT


def test_a_slot_that_is_overwritten_while_it_is_read_is_torn() -> None:
    slot = slot_with()

    class Overwriting:
        """Reads as usual, but another evict comes in between."""

        name = "overwriting"
        copy_in = PYTHON.copy_in

        def checksum(self, source: memoryview) -> int:
            seal.open_slot(slot, COLUMN.sequence + 1)
            source[0] ^= 1
            return PYTHON.checksum(source)

        def copy_out(self, into: memoryview, source: memoryview) -> int:
            self.checksum(source)
            return PYTHON.copy_out(into, source)

    assert seal.verify(slot, COLUMN, Overwriting()) is Miss.TORN
    seal.write(slot, COLUMN, 64, PAYLOAD)
    assert seal.copy_out(slot, COLUMN, memoryview(bytearray(8192)), Overwriting()) is Miss.TORN


def test_what_an_evict_that_was_broken_off_has_left_is_nobodys() -> None:
    slot = slot_with()
    assert not seal.clear(slot, COLUMN.sequence - 1, COLUMN.sequence, scrub=True)
    assert seal.clear(slot, COLUMN.sequence - 2, COLUMN.sequence - 1, scrub=True)
    assert not any(slot)


@pytest.mark.parametrize("scrub", [False, True])
def test_a_cleared_slot_is_absent_and_scrubbed_where_asked(*, scrub: bool) -> None:
    slot = slot_with()
    assert seal.clear(slot, COLUMN.sequence, scrub=scrub)
    assert seal.verify(slot, COLUMN) is Miss.ABSENT
    assert any(slot) is not scrub
    assert not seal.clear(slot, COLUMN.sequence, scrub=scrub)


def test_a_late_delete_takes_nothing_newer_with_it() -> None:
    slot = slot_with()
    assert not seal.clear(slot, COLUMN.sequence - 1, scrub=True)
    assert isinstance(seal.verify(slot, COLUMN), Header)
    seal.open_slot(slot, COLUMN.sequence)
    assert not seal.clear(slot, COLUMN.sequence - 1, scrub=True)
    assert seal.verify(slot, COLUMN) is Miss.TORN


@pytest.mark.parametrize(
    ("column", "tokens", "payload"),
    [
        (COLUMN, 0, PAYLOAD),
        (COLUMN, 65, PAYLOAD),
        (COLUMN, 64, PAYLOAD[:0]),
        (COLUMN, 64, memoryview(bytes(8192))),
        (Column(b"short", COLUMN.tag, 1), 64, PAYLOAD),
        (Column(COLUMN.key, b"short", 1), 64, PAYLOAD),
    ],
)
def test_what_could_not_be_read_back_is_not_written(
    column: Column, tokens: int, payload: memoryview
) -> None:
    with pytest.raises(ValueError, match=r"column|payload|key"):
        slot_with(payload, column, tokens)


def test_a_destination_that_is_too_small_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        seal.copy_out(slot_with(), COLUMN, memoryview(bytearray(10)))


# From one slot into another one

AFTER = COLUMN._replace(sequence=COLUMN.sequence + 7)  # as which it is sealed there


def transferred(slot: memoryview, column: Column = AFTER) -> tuple[Header | Miss, memoryview]:
    into = memoryview(bytearray(len(slot)))
    seal.open_slot_for(into, column.sequence, column.tag)
    return seal.transfer(seal.Transfer(slot, into, column)), into


def test_a_transferred_column_has_its_new_number_and_the_same_bytes() -> None:
    slot = slot_with(tokens=7)
    before = bytes(slot)
    found, into = transferred(slot)
    assert found == seal.verify(into, AFTER)
    assert isinstance(found, Header)
    assert (found.tokens, found.length, found.sequence) == (7, len(PAYLOAD), AFTER.sequence)
    assert into[HEADER_BYTES : HEADER_BYTES + len(PAYLOAD)] == PAYLOAD
    assert bytes(slot) == before


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1), st.integers(0, 7))
def test_a_column_with_a_flipped_bit_is_not_sealed_where_it_arrives(offset: int, bit: int) -> None:
    slot = slot_with()
    slot[offset] ^= 1 << bit
    found, into = transferred(slot)
    assert isinstance(found, Miss)
    assert seal.read(into[:HEADER_BYTES]) is Miss.TORN


def test_what_was_purged_while_it_was_transferred_is_not_sealed() -> None:
    slot, into = slot_with(), memoryview(bytearray(8192))
    seal.open_slot_for(into, AFTER.sequence, AFTER.tag)
    seal.clear(into, seal.SEQUENCE_MAX, scrub=True)
    assert seal.transfer(seal.Transfer(slot, into, AFTER)) is Miss.ABSENT
    assert not any(into[:HEADER_BYTES])


def test_slots_of_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="slots of 8192 and 4096 bytes"):
        seal.transfer(seal.Transfer(slot_with(), memoryview(bytearray(4096)), AFTER))
