"""Messages of a cache map, as a driver adds them to its stream in Redis and brains read them.

A stream begins with a whole snapshot, in parts, and goes on with deltas. Sequences count up by one
within a `life` of the driver, so that a reader knows when it has missed something.

An entry says that columns of one *chunk* are stored: those from the chunk's first column up to the one
that the entry is named after, by the first 8 bytes of its key. A chunk is 8 columns of a prompt. So a
prefix can be served as far as there is an entry for each of its chunks in a row; the last one may be for
a part of a chunk. The value of an entry is a time and a byte:

    value = (expires - base) << 8 | detail         base: of the message, in seconds since 1970

For the group of a layout that has the whole prefix (`PREFIX`) the detail is the length of a tail behind
the column, and a bit for "some of it is in tier 2". For a group with a window or states it has a bit for
each column of the chunk that is stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from swdriver_shim.keys import TAG_BYTES
from swdriver_shim.layout import GROUPS_MAX
from swdriver_shim.policy import NEVER
from telemetry.decoder import Limits, Malformed, Seconds, unpack

VERSION: Final = 1
FIELD: Final = b"map"
CHUNK: Final = 8  # columns
NAME_BYTES: Final = 8  # of a key
LIFE_BYTES: Final = 8
SPACE_BYTES: Final = 8  # of the digest of a namespace
VALUE_BYTES: Final = 4

PREFIX: Final = (
    0  # the class of entries whose detail is a tail; others are 1 + the number of their group
)
CLASSES_MAX: Final = GROUPS_MAX + 1
TAIL_BITS: Final = 0x3F
IN_TIER2: Final = 0x80

AFTER_MAX: Final = (1 << 24) - 2  # seconds after a message's base; half a year
NEVER_AFTER: Final = AFTER_MAX + 1
NEVER_AT: Final = 1 << 40
ENTRIES_MAX: Final = 1 << 14  # of one message
SECTIONS_MAX: Final = 1 << 10
DROPS_MAX: Final = 1 << 12
_LIMITS: Final = Limits(1 << 20)

# How most bytes of a cache reach its engine; `local` on one machine. Empty if that is not known.
CachePath = Literal["", "local", "rail", "leaf", "spine"]
Names = Annotated[bytes, Meta(max_length=NAME_BYTES * ENTRIES_MAX)]
Values = Annotated[bytes, Meta(max_length=VALUE_BYTES * ENTRIES_MAX)]
Space = Annotated[bytes, Meta(min_length=TAG_BYTES + SPACE_BYTES, max_length=TAG_BYTES + SPACE_BYTES)]


class Section(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Entries of one org in one namespace, its `space`: the isolation tag, and 8 bytes of the digest of
    the namespace. `names` have `values`; there is no entry for `removed` any more."""

    space: Space
    kind: Annotated[int, Meta(ge=0, lt=CLASSES_MAX)]
    names: Names = b""
    values: Values = b""
    removed: Names = b""

    @property
    def tag(self) -> bytes:
        return self.space[:TAG_BYTES]


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A delta, or a part of a snapshot. `parts`: of how many parts the snapshot is; 0 for a delta.
    `entries`: of the whole snapshot. `repeats`: the snapshot says what the messages before it have said.
    `serves`: whether the driver serves anything now; while one of its agents is lost it does not.
    `dropped`: spaces of which nothing is stored any more. `path`: how most bytes of the cache reach the
    engine; empty if that is not known."""

    version: Annotated[int, Meta(ge=1, le=1 << 16)]
    life: Annotated[bytes, Meta(min_length=LIFE_BYTES, max_length=LIFE_BYTES)]
    sequence: Annotated[int, Meta(ge=1, lt=1 << 62)]
    at: Seconds
    base: Annotated[int, Meta(ge=0, lt=1 << 33)]
    serves: bool
    part: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    parts: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    entries: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    repeats: bool = False
    sections: Annotated[tuple[Section, ...], Meta(max_length=SECTIONS_MAX)] = ()
    dropped: Annotated[tuple[Space, ...], Meta(max_length=DROPS_MAX)] = ()
    path: CachePath = ""

    def encode(self) -> bytes:
        return _ENCODER.encode(self)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Message)


def decode(raw: bytes) -> Message:
    """Raises Malformed for what is no message of this version."""
    message = unpack(raw, _DECODER, _LIMITS, has_bounds=True)
    if message.version != VERSION:
        raise Malformed(f"It is of version {message.version} of cache maps, not {VERSION}")
    if message.parts and message.part >= message.parts:
        raise Malformed("It is a part that its snapshot does not have")
    for section in message.sections:
        if len(section.names) % NAME_BYTES or len(section.removed) % NAME_BYTES:
            raise Malformed("The names of its entries have 8 bytes each")
        if len(section.values) * NAME_BYTES != len(section.names) * VALUE_BYTES:
            raise Malformed("Its entries have not one value each")
    return message


def entry(expires_at: float, detail: int) -> int:
    """An entry's value as drivers keep it: whole seconds since 1970, and its detail."""
    return (NEVER_AT if expires_at == NEVER else int(expires_at)) << 8 | detail


def pack_values(entries: Iterable[int], base: int) -> bytes:
    """Values of these entries, for a message with this base. What has expired then expires at the
    base."""
    packed = array("I", [_after(one >> 8, base) << 8 | one & 0xFF for one in entries])
    if _IS_BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def _after(second: int, base: int) -> int:
    return NEVER_AFTER if second == NEVER_AT else max(0, min(second - base, AFTER_MAX))


def in_parts(sections: Sequence[Section]) -> list[list[Section]]:
    """The sections, cut so that each list fits into one message."""
    lists: list[list[Section]] = [[]]
    left = ENTRIES_MAX
    for section in sections:
        names, removed = len(section.names) // NAME_BYTES, len(section.removed) // NAME_BYTES
        at = 0
        while at < max(names, removed):
            if left == 0 or len(lists[-1]) == SECTIONS_MAX:
                lists.append([])
                left = ENTRIES_MAX
            # Names and what is removed share the room of a message.
            end = min(max(names, removed), at + max(1, left // 2 if names and removed else left))
            cut = slice(NAME_BYTES * at, NAME_BYTES * end)
            lists[-1].append(
                Section(
                    section.space,
                    section.kind,
                    section.names[cut],
                    section.values[VALUE_BYTES * at : VALUE_BYTES * end],
                    section.removed[cut],
                )
            )
            left = max(0, left - (end - at) * (2 if names and removed else 1))
            at = end
    return lists


_IS_BIG_ENDIAN: Final = array("I", [1]).tobytes()[0] == 0
