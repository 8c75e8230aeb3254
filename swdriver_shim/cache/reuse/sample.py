"""A sample of an org's traffic, to try other policies on.

A few columns are selected by their keys, and each use of these is logged: when, and behind which others
of the sample. It has no tokens, and only half of each key. A column is in the sample or is not, however
often it is used, so the traffic between two of its uses is the same on a smaller scale (spatial
sampling, docs/adr/0022-reuse.md).

The log is bounded. When it fills fast the sample becomes half as large. What was recorded before stays
as it is until the log is full (docs/adr/0139-samples-not-thinned-early.md). Then it is thinned out, or
the oldest events are dropped if the log reaches back far enough.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from swdriver_shim.cache.displacement import Choice
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from telemetry.decoder import Count

if TYPE_CHECKING:
    from swdriver_shim.cache.reasons import Tally

LOG_BYTES_MAX: Final = 512 << 10  # of an org
CHUNK_BYTES: Final = 4 << 10  # thinned out at once: a quarter of a millisecond
EVENT_REFERENCES_MAX: Final = 2048  # of one event; of longer prompts a smaller share is taken
THINNED_PER_WRITTEN: Final = 2  # bytes of the log: so it gets smaller as fast as it grows
SPAN_S: Final = 2 * 3600.0  # a log that reaches back less far becomes a smaller sample
FILLED_MIN: Final = 1 / 8  # of the log: up to here it may fill at any speed,
FASTER_MAX: Final = 2.0  # then so many times as fast as would last for that span
COLUMNS_CHECKED: Final = 4  # of an average prompt, or up to twice as many
STRIDE_MAX: Final = 256
_THRESHOLD_BYTES: Final = 4
ALL_KEYS: Final = 1 << 8 * _THRESHOLD_BYTES
KEY_BYTES: Final = 8
DEPTH_MAX: Final = 0x7FFF  # deeper columns are in no sample
TIME_MAX_S: Final = 1 << 33
_TAIL: Final = 0x8000
_ABOVE_ALL: Final = b"\xff" * 17
_HEAD: Final = struct.Struct("<BHdI")
_COUNTS: Final = struct.Struct("<IQQQ")
_REFERENCE: Final = struct.Struct(f"<{KEY_BYTES}sH")
_REFERENCE_BYTES: Final = _REFERENCE.size
_ONE: Final = struct.Struct(f"{_REFERENCE.size}s")
_DEPTH_PLACE: Final = KEY_BYTES  # in a reference: of the lower byte


class Kind(IntEnum):
    MATCH = 0
    STORE = 1  # of a path
    MORE = 2  # the path of the last match is stored, and continues


class Reference(NamedTuple):
    """A column of the sample, in a prompt."""

    key: bytes
    depth: int
    tail: bool = False


class Event(NamedTuple):
    """`path`: the prompt's columns that are in the sample, in order; of `MORE` those that follow.
    `length`: whole columns of the prompt. A match also has how many of them were found, and the org's
    counts since the start: tokens, whole columns, and tokens hit."""

    kind: Kind
    at: float
    path: Sequence[Reference]
    length: int
    found: int = 0
    requested: int = 0
    columns: int = 0
    hit: int = 0


class Share(NamedTuple):
    """Which columns are in a sample: one of every `stride` in a prompt is checked, and is taken if its
    key is below a threshold. A smaller share is a part of every larger one."""

    stride: int = 1
    threshold: int = ALL_KEYS

    @property
    def of_all(self) -> float:
        return self.threshold / ALL_KEYS / self.stride

    @property
    def offset(self) -> int:
        """The first column that is checked: about the middle of a stride, so that prompts of any length
        are sampled alike; and one that a smaller stride checks as well."""
        return sum(bit for bit in (1, 4, 16, 64) if 2 * bit <= self.stride)

    @property
    def limit(self) -> bytes:
        """Keys below this, whole or half, are taken."""
        is_all = self.threshold == ALL_KEYS
        return _ABOVE_ALL if is_all else self.threshold.to_bytes(_THRESHOLD_BYTES, "big")

    def less(self, columns: float) -> Share:
        """Half the share. `columns`: of an average prompt; of long prompts fewer are checked."""
        if columns >= 2 * COLUMNS_CHECKED * self.stride and self.stride < STRIDE_MAX:
            return Share(2 * self.stride, self.threshold)
        return Share(self.stride, max(1, self.threshold // 2))


class Sample(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sample of an org at one driver. Times are of the driver's clock."""

    org: str
    now: Annotated[float, Meta(ge=0, lt=TIME_MAX_S)]
    complete: bool  # since the start
    stride: Annotated[int, Meta(ge=1, le=STRIDE_MAX)]
    threshold: Annotated[int, Meta(ge=1, le=ALL_KEYS)]
    requests: Count  # since the start, as are
    requested: Count  # tokens,
    columns: Count  # whole ones, and
    hit: Count  # tokens
    held_bytes: Count  # of the org in memory
    room_bytes: Count  # that, and free memory
    column_bytes: Annotated[int, Meta(ge=1, le=1 << 50)]
    displacement: Choice | None = None  # None: the policy names one
    log: Annotated[bytes, Meta(max_length=2 * LOG_BYTES_MAX)]

    @property
    def share(self) -> Share:
        return Share(self.stride, self.threshold)

    def events(self) -> list[Event]:
        """Raises ValueError for an invalid log."""
        return fewer(read(self.log), self.share)


class Recorder:
    """Records the sample of one org. Most calls only check a few keys."""

    __slots__ = (
        "_chunks",
        "_columns",
        "_is_thinning",
        "_last",
        "_limit",
        "_match",
        "_offset",
        "_prompts",
        "_size",
        "_stride",
        "_unthinned",
        "bytes",
        "columns",
        "complete",
        "share",
    )

    def __init__(self) -> None:
        self.columns = 0  # whole columns that were asked for
        self.complete = True
        self.bytes = 0
        self._chunks: list[bytearray] = [bytearray()]  # oldest first
        self._unthinned = 0  # of these, recorded with a larger share
        self._is_thinning = False
        self._size = 0  # about the bytes that the log would have if all of it had this share
        self._last = 0.0  # never steps back, as clocks may
        self._match: list[bytes] | None = None  # the path of the last event, if that was a match
        self._prompts = self._columns = 0  # that were asked for or stored
        self._take(Share())

    def matched(self, keys: list[bytes], tokens: int, tally: Tally, now: float) -> None:
        """These columns were asked for, and so many tokens were hit. The tally has counted them
        already."""
        self.columns += len(keys)
        checked, picked = self._pick(keys, len(keys))
        if picked:
            found = tokens // COLUMN_TOKENS
            counts = _COUNTS.pack(found, tally.requested, self.columns, tally.hits.total())
            self._write(Kind.MATCH, now, len(keys), self._packed(checked, picked), counts)
        self._match = picked

    def stored(self, prompt: Prompt, verified: int, now: float) -> None:
        """So many tokens of the prompt are stored now, or were already."""
        whole, rest = divmod(verified, COLUMN_TOKENS)
        checked, picked = self._pick(prompt.keys, whole)
        before, self._match = self._match, None
        kind = Kind.STORE
        if before and picked[: len(before)] == before:
            kind, picked = Kind.MORE, picked[len(before) :]
        packed = self._packed(checked, picked) if picked else b""
        if rest and whole % self._stride == self._offset and whole <= DEPTH_MAX:
            tail = prompt.tail(whole, rest)
            if tail < self._limit:
                packed += _REFERENCE.pack(tail[:KEY_BYTES], whole | _TAIL)
        if packed or kind is Kind.MORE:
            self._write(kind, now, whole, packed)

    @property
    def log(self) -> bytes:
        return b"".join(self._chunks)

    def forget(self) -> None:
        """Drop all keys, after a purge. The share stays, since traffic will be similar."""
        self._chunks, self._unthinned, self._is_thinning = [bytearray()], 0, False
        self.bytes = self._size = 0
        self._match, self.complete = None, False

    def _pick(self, keys: list[bytes], whole: int) -> tuple[list[bytes], list[bytes]]:
        """Those of the first whole columns that are checked, and those of these that are in the sample.
        If they are too many for one event, the sample becomes smaller first."""
        self._prompts += 1
        self._columns += whole
        end = whole if whole <= DEPTH_MAX else DEPTH_MAX + 1
        while True:
            limit, checked = self._limit, keys[self._offset : end : self._stride]
            is_all = limit is _ABOVE_ALL
            picked = checked if is_all else [key for key in checked if key < limit]
            if len(picked) <= EVENT_REFERENCES_MAX:
                return checked, picked
            self._reduce()

    def _reduce(self) -> None:
        """Take a smaller share from here on."""
        self._take(self.share.less(self._columns / self._prompts))
        self._match = None
        if newest := self._chunks[-1]:
            self._size = self._size * len(thinned(newest, self.share)) // len(newest)
            self._chunks.append(bytearray())
        else:
            self._size //= 2
        self._unthinned = len(self._chunks) - 1

    def _take(self, share: Share) -> None:
        self.share = share
        self._limit, self._offset, self._stride = share.limit, share.offset, share.stride

    def _packed(self, checked: list[bytes], picked: list[bytes]) -> bytes:
        """References to the picked ones of the checked columns."""
        offset, stride = self._offset, self._stride
        depths: Sequence[int] = range(offset, DEPTH_MAX + 1, stride)
        if len(picked) < len(checked):  # of long prompts all are taken that are checked
            depths, place = list[int](), -1
            for key in picked:
                place = checked.index(key, place + 1)
                depths.append(offset + stride * place)
        return b"".join(map(_REFERENCE.pack, picked, depths))  # of a key its first half

    def _write(
        self, kind: Kind, now: float, length: int, references: bytes, counts: bytes = b""
    ) -> None:
        if now > self._last:
            self._last = now
        if len(self._chunks[-1]) >= CHUNK_BYTES and kind is not Kind.MORE:  # it stays with its match
            if not self._is_thinning:
                self._bound()
            if self._chunks[-1]:
                self._chunks.append(bytearray())
        head = _HEAD.pack(kind, len(references) // _REFERENCE_BYTES, self._last, length)
        event = head + counts + references
        written = len(event)
        self._chunks[-1] += event
        self.bytes += written
        self._size += written
        if self._is_thinning:
            self._thin(THINNED_PER_WRITTEN * written)

    def _bound(self) -> None:
        """If the log is full, drop the oldest chunks, or thin the others out with each event from here
        on. If it fills fast, take a smaller share before it is full."""
        _, _, oldest, _ = _HEAD.unpack_from(self._chunks[0])
        span = self._last - oldest
        is_full = self.bytes >= LOG_BYTES_MAX
        if is_full and (span >= SPAN_S or self.share.threshold == 1):
            while self.bytes >= LOG_BYTES_MAX:
                self.bytes -= len(self._chunks.pop(0))
                self._unthinned = max(0, self._unthinned - 1)
            self._chunks = self._chunks or [bytearray()]
            self._size, self.complete = min(self._size, self.bytes), False
        elif is_full:
            if not self._unthinned:
                self._reduce()
            self._is_thinning = True
        elif self._size / LOG_BYTES_MAX > max(FILLED_MIN, FASTER_MAX * span / SPAN_S):
            self._reduce()

    def _thin(self, at_least: int) -> None:
        """Thin out so many bytes of what was recorded with a larger share, a chunk at least."""
        while self._unthinned and at_least > 0:
            at_least -= len(self._chunks[self._unthinned - 1])
            self._thin_one()
        if not self._unthinned:
            self._is_thinning, self._size = False, self.bytes

    def _thin_one(self) -> None:
        """Thin out the newest chunk that was recorded with a larger share, and merge it with the next
        one if both fit."""
        self._unthinned -= 1
        place = self._unthinned
        left = thinned(self._chunks[place], self.share)
        self.bytes -= len(self._chunks[place]) - len(left)
        following = self._chunks[place + 1]
        if not left or len(left) + len(following) <= CHUNK_BYTES:
            self._chunks[place : place + 2] = [left + following]
        else:
            self._chunks[place] = left


def thinned(log: bytes | bytearray, share: Share) -> bytearray:
    """The part of a log that is in a smaller sample. Raises ValueError for an invalid log."""
    limit, is_checked = share.limit, _checked_depths(share)
    left, is_matched = bytearray(), False
    for kind, at, length, counts, references in _parse(log):
        checked = references[_DEPTH_PLACE :: _REFERENCE.size].translate(is_checked)
        kept = [one for (one,) in compress(_ONE.iter_unpack(references), checked) if one < limit]
        becomes = Kind.STORE if kind is Kind.MORE and not is_matched else kind
        if kept or becomes is Kind.MORE:
            left += b"".join((_HEAD.pack(becomes, len(kept), at, length), counts, *kept))
        is_matched = bool(kept) and kind is Kind.MATCH
    return left


@lru_cache
def _checked_depths(share: Share) -> bytes:
    """By the lower byte of a depth, which is enough since strides are powers of two, up to 256: 1 if
    the share checks it."""
    return bytes(depth % share.stride == share.offset for depth in range(256))


def read(log: bytes | bytearray) -> Iterator[Event]:
    """Raises ValueError for an invalid log."""
    for kind, at, length, counts, references in _parse(log):
        path = [
            Reference(key, depth & DEPTH_MAX, depth >= _TAIL)
            for key, depth in _REFERENCE.iter_unpack(references)
        ]
        yield Event(kind, at, path, length, *(_COUNTS.unpack(counts) if counts else ()))


def fewer(events: Iterable[Event], share: Share) -> list[Event]:
    """The part of these events that is in a smaller sample."""
    limit, stride, offset = share.limit, share.stride, share.offset
    left, is_matched = [], False
    for event in events:
        kept = [one for one in event.path if one.key < limit and one.depth % stride == offset]
        kind = Kind.STORE if event.kind is Kind.MORE and not is_matched else event.kind
        if kept or kind is Kind.MORE:
            is_whole = kind is event.kind and len(kept) == len(event.path)
            left.append(event if is_whole else event._replace(kind=kind, path=kept))
        is_matched = bool(kept) and kind is Kind.MATCH
    return left


_Parsed = tuple[Kind, float, int, bytes, bytes]


def _parse(log: bytes | bytearray) -> Iterator[_Parsed]:
    place, newest = 0, 0.0
    try:
        while place < len(log):
            number, count, at, length = _HEAD.unpack_from(log, place)
            kind = _KINDS[number]
            begin = place + _HEAD.size + (_COUNTS.size if kind is Kind.MATCH else 0)
            end = begin + count * _REFERENCE.size
            counts = bytes(log[place + _HEAD.size : begin])
            if end > len(log):
                raise ValueError("a log of reuse ends in the middle")
            if not newest <= at < TIME_MAX_S:  # false for NaN
                raise ValueError("a log of reuse goes back in time, or beyond it")
            newest = at
            yield kind, at, length, counts, bytes(log[begin:end])
            place = end
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a log of reuse: {error}") from error


_KINDS: Final = tuple(Kind)
