"""How large fragments are."""

from __future__ import annotations

from typing import Final

from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.tier2.column_file import PAGE

LINE_BYTES: Final = 64  # fragments begin at cache lines of a slot
SLOTS: Final = 32  # of the fragment shard at a holder: as many fragments are on their way at once


def fragment_bytes(file_bytes: int, data: int) -> int:
    """Of each fragment of a file but the last one with data, which may be shorter."""
    return -(-file_bytes // (data * LINE_BYTES)) * LINE_BYTES


def fragment_span(file_bytes: int, data: int, place: int) -> tuple[int, int]:
    """Where in the file the fragment at this place begins and ends. One with parity has no bytes of the
    file: it is as long as the first one."""
    step = fragment_bytes(file_bytes, data)
    if place >= data:
        return 0, step
    return place * step, min(file_bytes, (place + 1) * step)


def fragment_slot_bytes(slot_bytes: int, data: int) -> int:
    """Of the fragment shard at a holder, for the columns of a shard with slots of this size. A file that
    is encrypted may be a page larger than the slot."""
    return slot_bytes_for(fragment_bytes(slot_bytes + PAGE, data))


def fragment_part(part: str, place: int, data: int, parity: int) -> str:
    """Which part of columns the fragment shard holds: fragments of another code are other columns."""
    return f"{part}.{place}-{data}-{parity}"
