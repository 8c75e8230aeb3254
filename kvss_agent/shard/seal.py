"""The seal of a column: 64 bytes before its payload saying whose, which, and that it is whole.

A reader that knows which column it expects gets exactly that column or a typed reason why not. Nothing
else in the store has to be trusted for this: not the network, not the slot numbers, not the writer's
luck. The layout, little-endian:

    offset  0  magic       4   b"TIDE"
            4  version     1   of this layout
            5  state       1   1 while the payload is being written, 2 once it is sealed
            6  tokens      2   1…64; a tail column holds fewer than 64
            8  sequence    8   the number of the evict that wrote it
           16  key        16   of the column, truncated
           32  tag        16   of the isolation domain, usually an org
           48  checksum    8   XXH3-64 of the payload
           56  length      4   bytes of payload
           60  check       4   XXH3-64 of the 60 bytes above, its lower half

`check` covers `checksum`, so header and payload vouch for each other. A writer marks the slot as open,
copies, and seals last: a writer that dies in between leaves a slot that says so. On machines that
reorder stores the mark may lie; the checksum does not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvss_agent.mover import PYTHON, Bytes, Mover, zero

HEADER_BYTES: Final = 64
KEY_BYTES: Final = 16
TAG_BYTES: Final = 16
TOKENS_MAX: Final = 64
PAYLOAD_BYTES_MAX: Final = 1 << 30
SEQUENCE_MAX: Final = 2**64 - 1
VERSION: Final = 1

MAGIC: Final = b"TIDE"
_OPEN, _SEALED = 1, 2
_FIELDS = struct.Struct("<4sBBHQ16s16sQI")
_HEADER = struct.Struct("<4sBBHQ16s16sQII")
_MARK = struct.Struct("<4sBBHQ")
_NOTHING = bytes(HEADER_BYTES)
_LOWER_HALF = 0xFFFF_FFFF
_new = tuple.__new__  # of a named tuple, in half the time

NO_HEADER: Final = _NOTHING  # of an empty slot
OPEN_HEADER: Final = _MARK.pack(MAGIC, VERSION, _OPEN, 0, 0).ljust(HEADER_BYTES, b"\0")


class Miss(StrEnum):
    """Why a refill gives no bytes. Every one of these is legal; wrong bytes never are."""

    ABSENT = "absent"  # the slot holds nothing: never written, or deleted
    TORN = "torn"  # being written, or its writer died, or it was overwritten while being read
    STALE = "stale"  # another column of the same tag, or another evict of this one
    FOREIGN = "foreign"  # a column of another isolation tag: somebody's mistake, worth an alarm
    CORRUPT = "corrupt"  # not what was sealed: a flipped bit, an unknown version, an impossible length
    LATE = "late"  # what it had to come after did not come in time
    REFUSED = "refused"  # the agent will not: too many at once, or no such slot
    LOST = "lost"  # the agent cannot be reached


class Column(NamedTuple):
    """Which bytes a reader expects: the column, in whose name, as which evict wrote it."""

    key: bytes
    tag: bytes
    sequence: int


class Header(NamedTuple):
    """What an intact header says."""

    tokens: int
    sequence: int
    key: bytes
    tag: bytes
    checksum: int
    length: int


class Transfer(NamedTuple):
    """A column that goes from a slot into another one of the same size, which is open for it."""

    slot: memoryview
    into: memoryview
    column: Column  # sequence: as which evict it is sealed there


def pack(column: tuple[bytes, bytes, int], tokens: int, length: int, checksum: int) -> bytes:
    """The header of a sealed column. Refuses what `read` would not accept."""
    _check(column, tokens, length)
    return _packed(column, tokens, length, checksum)


def _check(column: tuple[bytes, bytes, int], tokens: int, length: int) -> None:
    if len(column[0]) != KEY_BYTES or len(column[1]) != TAG_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes and a tag {TAG_BYTES}")
    if not 0 < tokens <= TOKENS_MAX:
        raise ValueError(f"a column holds 1 to {TOKENS_MAX} tokens, not {tokens}")
    if not 0 < length <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"a payload has 1 to {PAYLOAD_BYTES_MAX} bytes, not {length}")


def _packed(column: tuple[bytes, bytes, int], tokens: int, length: int, checksum: int) -> bytes:
    key, tag, sequence = column
    fields = _FIELDS.pack(MAGIC, VERSION, _SEALED, tokens, sequence, key, tag, checksum, length)
    return fields + xxh3_64_digest(fields)[:3:-1]


def read(header: Bytes) -> Header | Miss:
    """What 64 bytes say by themselves: absent, torn, corrupt, or an intact header."""
    raw = bytes(header)
    magic, version, state, tokens, sequence, key, tag, checksum, length, check = _HEADER.unpack(raw)
    if magic != MAGIC:
        return Miss.ABSENT if raw == _NOTHING else Miss.CORRUPT
    if version == VERSION and state == _OPEN:
        return Miss.TORN
    if version != VERSION or state != _SEALED or check != xxh3_64_intdigest(raw[:60]) & _LOWER_HALF:
        return Miss.CORRUPT
    if not 0 < tokens <= TOKENS_MAX or not 0 < length <= PAYLOAD_BYTES_MAX:
        return Miss.CORRUPT
    return _new(Header, (tokens, sequence, key, tag, checksum, length))


def identify(header: Bytes, expected: Column) -> Header | Miss:
    """As `read`; and it is the column that was expected. Says nothing of the payload yet."""
    found = read(header)
    if not isinstance(found, Header):  # which is quicker to tell than a Miss
        return found
    return compare(found, *expected)


def identify_any(header: Bytes, key: bytes, tag: bytes) -> Header | Miss:
    """As `identify`, whichever evict wrote it."""
    found = read(header)
    return compare(found, key, tag, found.sequence) if isinstance(found, Header) else found


def compare(found: Header, key: bytes, tag: bytes, sequence: int) -> Header | Miss:
    """An intact header, if it is of the column that was expected."""
    if found.tag != tag:
        return Miss.FOREIGN
    if found.key != key or found.sequence != sequence:
        return Miss.STALE
    return found


def write(
    slot: memoryview,
    column: tuple[bytes, bytes, int],
    tokens: int,
    payload: memoryview,
    mover: Mover = PYTHON,
) -> None:
    """Replace what the slot holds by this column (key, tag, sequence), sealed.

    `slot` is writable and has room for header and payload; nobody else writes to it. Readers that
    look in between find it torn. The payload must not change meanwhile: what was copied is what the
    checksum says only if it stood still, else readers find it corrupt.
    """
    length = len(payload)
    _check(column, tokens, length)
    end = HEADER_BYTES + length
    if end > len(slot):
        raise ValueError(f"a payload of {length} bytes does not fit a slot of {len(slot)}")
    _MARK.pack_into(slot, 0, MAGIC, VERSION, _OPEN, 0, column[2])
    checksum = mover.copy_in(slot[HEADER_BYTES:end], payload)
    slot[:HEADER_BYTES] = _packed(column, tokens, length, checksum)


def verifier(mover: Mover) -> Callable[[memoryview, Column], Header | Miss]:
    """`verify` with this mover. A compiled mover has one of its own."""
    compiled: Callable[[memoryview, Column], Header | Miss] | None
    compiled = getattr(mover, "verify_column", None)
    return compiled or (verify if mover is PYTHON else partial(verify, mover=mover))


def open_slot(slot: memoryview, sequence: int) -> None:
    """Mark the slot as being written by this evict. Whatever it held is gone from here on."""
    _MARK.pack_into(slot, 0, MAGIC, VERSION, _OPEN, 0, sequence)


def open_slot_for(slot: memoryview, sequence: int, tag: bytes) -> None:
    """The same, and whose column it will be: who purges that tag waits, or empties the slot."""
    open_slot(slot, sequence)
    slot[32:48] = tag


def open_unless_newer(slot: memoryview, sequence: int, last: int, tag: bytes) -> bool:
    """`open_slot_for`, unless the slot `is_newer`; whether it was opened."""
    magic, _, _, _, there = _MARK.unpack_from(slot)
    if magic == MAGIC and sequence < there <= last:
        return False
    _MARK.pack_into(slot, 0, MAGIC, VERSION, _OPEN, 0, sequence)
    slot[32:48] = tag
    return True


def is_open_for(slot: memoryview, sequence: int, tag: bytes) -> bool:
    """Whether it still is as `open_slot_for` has left it."""
    mark = _MARK.pack(MAGIC, VERSION, _OPEN, 0, sequence)
    return bytes(slot[: len(mark)]) == mark and bytes(slot[32:48]) == tag


def verify(slot: memoryview, expected: Column, mover: Mover = PYTHON) -> Header | Miss:
    """Check header and payload in place. On success the payload is `slot[64 : 64 + length]`.

    It is what was sealed when this was called, and stays so as long as a lease keeps the writer away.
    """
    found = identify(slot[:HEADER_BYTES], expected)
    if not isinstance(found, Header):
        return found
    payload = payload_of(slot, found)
    if payload is None:
        return Miss.CORRUPT
    return found if mover.checksum(payload) == found.checksum else _why_not(slot, found)


def copy_out(
    slot: memoryview, expected: Column, into: memoryview, mover: Mover = PYTHON
) -> Header | Miss:
    """Copy the payload to the front of `into`, and check what has arrived there.

    On a miss `into` may hold anything. It has to be large enough for the payload: ValueError if not.
    """
    found = identify(slot[:HEADER_BYTES], expected)
    if not isinstance(found, Header):
        return found
    payload = payload_of(slot, found)
    if payload is None:
        return Miss.CORRUPT
    length, room = found.length, len(into)
    if length > room:
        raise ValueError(f"a payload of {length} bytes does not fit {room}")
    arrived = mover.copy_out(into if length == room else into[:length], payload)
    return found if arrived == found.checksum else _why_not(slot, found)


def transfer(one: Transfer, mover: Mover = PYTHON) -> Header | Miss:
    """Copy a column, whichever evict wrote it, into a slot that `open_slot_for` has opened for `column`,
    and seal it there as that.

    It is checked where it has arrived. On a miss, `into` may hold anything, unsealed.
    """
    slot, into, column = one
    if len(slot) != len(into):
        raise ValueError(f"slots of {len(slot)} and {len(into)} bytes")
    found = identify_any(slot[:HEADER_BYTES], column.key, column.tag)
    if isinstance(found, Header):
        found = copy_out(slot, column._replace(sequence=found.sequence), into[HEADER_BYTES:], mover)
    return close_slot(into, column, found)


def transfer_all(transfers: Sequence[Transfer], mover: Mover) -> list[Header | Miss]:
    """`transfer` for each. A compiled mover asks for the interpreter once."""
    compiled: Callable[[Sequence[Transfer]], list[Header | Miss]] | None
    compiled = getattr(mover, "transfer_columns", None)
    return compiled(transfers) if compiled else [transfer(one, mover) for one in transfers]


def close_slot(slot: memoryview, column: Column, arrived: Header | Miss) -> Header | Miss:
    """Seal what has arrived, and was checked, in a slot that `open_slot_for` has opened for `column`.
    ABSENT if the slot was purged meanwhile. A miss stays one, and changes nothing."""
    if isinstance(arrived, Miss):
        return arrived
    if not is_open_for(slot, column.sequence, column.tag):
        return Miss.ABSENT
    slot[:HEADER_BYTES] = pack(column, arrived.tokens, arrived.length, arrived.checksum)
    return arrived._replace(sequence=column.sequence)


def tag_of(slot: memoryview) -> bytes | None:
    """Whose column the slot holds, or held until somebody began to write there; None for nobody's."""
    return bytes(slot[32:48]) if bytes(slot[:4]) == MAGIC else None


def payload_of(slot: memoryview, header: Header) -> memoryview | None:
    """The payload that an intact header speaks of, or None where it would not fit the slot."""
    end = HEADER_BYTES + header.length
    return slot[HEADER_BYTES:end] if end <= len(slot) else None


def is_newer(slot: memoryview, than: int, last: int = SEQUENCE_MAX) -> bool:
    """Has a later evict than this one written, or begun to write, what is in the slot?

    A number above `last`, that of the last evict so far, is of one that was broken off: it counts as
    none.
    """
    magic, _, _, _, sequence = _MARK.unpack_from(slot)
    return bool(magic == MAGIC and than < sequence <= last)


def clear(slot: memoryview, up_to: int, last: int = SEQUENCE_MAX, *, scrub: bool) -> bool:
    """Empty the slot if an evict up to number `up_to` wrote it; whether there was something to empty.

    What a later evict wrote, or is writing, stays: a delete that comes late takes nothing newer
    with it. `scrub` overwrites the payload with zeros too, all of the slot.
    """
    if is_newer(slot, up_to, last):
        return False
    found = bytes(slot[:HEADER_BYTES]) != _NOTHING
    slot[:HEADER_BYTES] = _NOTHING
    if scrub:
        zero(slot[HEADER_BYTES:])
    return found


def _why_not(slot: memoryview, read_before: Header) -> Miss:
    """A payload does not match its header: overwritten meanwhile, or damaged?"""
    return Miss.CORRUPT if read(slot[:HEADER_BYTES]) == read_before else Miss.TORN
