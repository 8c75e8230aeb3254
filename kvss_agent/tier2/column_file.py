"""A column as a file: the slot's own layout, under a header of its own and with zeros at its end.

Where the slot holds leftovers beyond its payload, which may be another org's, the file has zeros, up to
the next page, so that a disk can take it past the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvss_agent.mover import Mover
from kvss_agent.shard.arena import SLOT_ALIGNMENT, SLOT_BYTES_MAX, slot_bytes_for
from kvss_agent.shard.seal import (
    HEADER_BYTES,
    Column,
    Header,
    Miss,
    identify_any,
    pack,
    payload_of,
)
from kvss_agent.tier2.address import Address

PAGE: Final = SLOT_ALIGNMENT
FILE_BYTES_MAX: Final = SLOT_BYTES_MAX + PAGE  # of an encrypted one
_ZEROS: Final = memoryview(bytes(PAGE))


class Landing(NamedTuple):
    """Where the bytes of a file go to, and then, with their number, what they are."""

    parts: Sequence[memoryview]
    accept: Callable[[int], Header | Miss]


class Form:
    """How a column is put into a file: as it lies in the slot, or by a subclass otherwise. Nothing but
    the seal is trusted on the way back: a miss may leave anything in the slot's payload."""

    def file_bytes(self, length: int) -> int:
        """Of a payload of so many bytes."""
        return slot_bytes_for(length)

    def outgoing(
        self, slot: memoryview, header: Header, address: Address, note: int
    ) -> Sequence[memoryview]:
        """The parts of the file for what the slot holds."""
        return parts_of(slot, header, address.column(note))

    def incoming(self, slot: memoryview, address: Address, mover: Mover) -> Landing:
        """To be filled from the file. The slot's header stays as it is."""
        return landing(slot, address.column(0), mover)


CLEAR: Final = Form()


def parts_of(slot: memoryview, header: Header, filed: Column) -> Sequence[memoryview]:
    """What the file consists of whose header says `filed`."""
    end = HEADER_BYTES + header.length
    head = pack(filed, header.tokens, header.length, header.checksum)
    return memoryview(head), slot[HEADER_BYTES:end], padding(end)


def landing(slot: memoryview, filed: Column, mover: Mover) -> Landing:
    """For the file whose header says `filed`, with any note."""
    head = bytearray(HEADER_BYTES)

    def accept(received: int) -> Header | Miss:
        found = identified(head, received, slot, filed, CLEAR.file_bytes)
        if isinstance(found, Miss):
            return found
        header, payload = found
        return header if mover.checksum(payload) == header.checksum else Miss.CORRUPT

    return Landing((memoryview(head), slot[HEADER_BYTES:]), accept)


def plausible(file_bytes: int) -> bool:
    """Whether a column's file can have this size. Any other is half of something, or of a stranger."""
    return 0 < file_bytes <= FILE_BYTES_MAX and file_bytes % PAGE == 0


def padding(end: int) -> memoryview:
    """Zeros from here up to the next page."""
    return _ZEROS[: -end % PAGE]


def identified(
    head: bytearray,
    received: int,
    slot: memoryview,
    filed: Column,
    file_bytes: Callable[[int], int],
) -> tuple[Header, memoryview] | Miss:
    """What has been received by its header, and where its payload belongs; or why it is not that
    column's file."""
    if received < HEADER_BYTES:
        return Miss.TORN
    header = identify_any(head, filed.key, filed.tag)
    if isinstance(header, Miss):
        return Miss.TORN if header is Miss.ABSENT else header  # zeros: the file's blocks never came
    payload = payload_of(slot, header)
    if payload is None:
        return Miss.CORRUPT
    if received != (expected := file_bytes(header.length)):
        return Miss.TORN if received < expected else Miss.CORRUPT
    return header, payload
