"""A column as a file: the slot's own layout, under a header of its own and with zeros at its end.

Where the slot holds leftovers beyond its payload, which may be another org's, the file has zeros, up to
the next page, so that a disk can take it past the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard.arena import SLOT_ALIGNMENT, slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss, identify, pack, payload_of, read
from kvss_agent.tier2.address import Address

PAGE: Final = SLOT_ALIGNMENT
_ZEROS: Final = memoryview(bytes(PAGE))


class Landing(NamedTuple):
    """Where the bytes of a file go to, and then, with their number, what they are."""

    parts: Sequence[memoryview]
    accept: Callable[[int], Header | Miss]


class Form(Protocol):
    """How a column is put into a file. Nothing but the seal is trusted on the way back: a miss may leave
    anything in the slot's payload."""

    def file_bytes(self, length: int) -> int:
        """Of a payload of so many bytes."""

    def outgoing(
        self, slot: memoryview, header: Header, address: Address, note: int
    ) -> Sequence[memoryview]:
        """The parts of the file for what the slot holds."""

    def incoming(self, slot: memoryview, address: Address, mover: Mover) -> Landing:
        """To be filled from the file. The slot's header stays as it is."""


class Clear:
    """As it lies in the slot."""

    def file_bytes(self, length: int) -> int:
        return slot_bytes_for(length)

    def outgoing(
        self, slot: memoryview, header: Header, address: Address, note: int
    ) -> Sequence[memoryview]:
        return outgoing(slot, header, address.column(note))

    def incoming(self, slot: memoryview, address: Address, mover: Mover) -> Landing:
        head = bytearray(HEADER_BYTES)
        return Landing(
            incoming(slot, head), lambda received: accept(slot, head, received, address, mover)
        )


CLEAR: Final = Clear()


def plausible(file_bytes: int) -> bool:
    """Whether a column's file can have this size. Any other is half of something."""
    return file_bytes > 0 and file_bytes % PAGE == 0


def outgoing(slot: memoryview, header: Header, column: Column) -> tuple[memoryview, ...]:
    """The parts of the file for what the slot holds, under the header of `column`."""
    end = HEADER_BYTES + header.length
    head = pack(column, header.tokens, header.length, header.checksum)
    return memoryview(head), slot[HEADER_BYTES:end], _ZEROS[: -end % PAGE]


def incoming(slot: memoryview, head: bytearray) -> tuple[memoryview, ...]:
    """Where the bytes of a file go to: its header apart, so that the slot's own stays as it is."""
    return memoryview(head), slot[HEADER_BYTES:]


def accept(
    slot: memoryview, head: bytearray, received: int, address: Address, mover: Mover = PYTHON
) -> Header | Miss:
    """What has been received: the header of that column's file, its payload in its place, or why not.

    Nothing but the seal is trusted. On a miss the slot's payload may be anything.
    """
    found = read_head(head, received, address)
    if isinstance(found, Miss):
        return found
    payload = payload_of(slot, found)
    if payload is None:
        return Miss.CORRUPT
    expected = slot_bytes_for(found.length)
    if received != expected:
        return Miss.TORN if received < expected else Miss.CORRUPT
    return found if mover.checksum(payload) == found.checksum else Miss.CORRUPT


def read_head(
    head: bytearray, received: int, address: Address, *, encrypted: bool = False
) -> Header | Miss:
    """The header, if it is the one of that column's file."""
    if received < HEADER_BYTES:
        return Miss.TORN
    header = read(head)
    note = 0 if isinstance(header, Miss) else header.sequence
    found = identify(head, address.column(note, encrypted=encrypted))
    return Miss.TORN if found is Miss.ABSENT else found  # zeros: the file's blocks never came
