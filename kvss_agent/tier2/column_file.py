"""A column as a file: the slot's own layout, so that the kernel can move the bytes between both.

The first page of a file and of a slot differ in the header, and the last one where the slot holds
leftovers beyond its payload, which may be another org's. These two go through a scratch buffer; the
pages between them are left as they are, for a backend to move as it likes.
"""

from __future__ import annotations

import mmap
from typing import Final

from kvss_agent.arena import SLOT_ALIGNMENT, slot_bytes_for
from kvss_agent.mover import PYTHON, Mover, zero
from kvss_agent.seal import HEADER_BYTES, Column, Header, Miss, identify, pack, payload_of, read
from kvss_agent.tier2.address import Address

PAGE: Final = SLOT_ALIGNMENT


class Scratch:
    """Two pages, aligned for direct I/O. One thread uses it at a time."""

    def __init__(self) -> None:
        pages = memoryview(mmap.mmap(-1, 2 * PAGE))
        self.head, self.tail = pages[:PAGE], pages[PAGE:]


def plausible(file_bytes: int) -> bool:
    """Whether a column's file can have this size. Any other is half of something."""
    return file_bytes > 0 and file_bytes % PAGE == 0


def outgoing(
    slot: memoryview, header: Header, column: Column, scratch: Scratch
) -> tuple[memoryview, ...]:
    """The parts of the file for what the slot holds, under the header of `column`."""
    end = HEADER_BYTES + header.length
    inner_end = end // PAGE * PAGE
    head, tail = scratch.head, scratch.tail
    first = min(end, PAGE)
    head[:HEADER_BYTES] = pack(column, header.tokens, header.length, header.checksum)
    head[HEADER_BYTES:first] = slot[HEADER_BYTES:first]
    zero(head[first:])
    if end <= PAGE:
        return (head,)
    rest = end - inner_end
    tail[:rest] = slot[inner_end:end]
    zero(tail[rest:])
    parts = (head, slot[PAGE:inner_end], tail if rest else tail[:0])
    return tuple(part for part in parts if part)


def incoming(slot: memoryview, scratch: Scratch) -> tuple[memoryview, ...]:
    """Where the bytes of a file go to. `accept` completes the slot; its header stays as it is."""
    zero(scratch.head)
    return (scratch.head, slot[PAGE:]) if len(slot) > PAGE else (scratch.head,)


def accept(
    slot: memoryview, scratch: Scratch, received: int, address: Address, mover: Mover = PYTHON
) -> Header | Miss:
    """What has been received: the header of that column's file, its payload in its place, or why not.

    Nothing but the seal is trusted. On a miss the slot's payload may be anything.
    """
    if received < HEADER_BYTES:
        return Miss.TORN
    header = read(scratch.head[:HEADER_BYTES])
    note = 0 if isinstance(header, Miss) else header.sequence
    found = identify(scratch.head[:HEADER_BYTES], address.column(note))
    if isinstance(found, Miss):
        return Miss.TORN if found is Miss.ABSENT else found  # zeros: the file's blocks never came
    payload = payload_of(slot, found)
    if payload is None:
        return Miss.CORRUPT
    expected = slot_bytes_for(found.length)
    if received != expected:
        return Miss.TORN if received < expected else Miss.CORRUPT
    slot[HEADER_BYTES:PAGE] = scratch.head[HEADER_BYTES:]
    return found if mover.checksum(payload) == found.checksum else Miss.CORRUPT
