"""What is kept of an org's traffic, so that other policies can be tried on it later.

Of all columns a few are chosen by their keys, and each use of these is written down: when, and behind
which others of the sample. No tokens, and of each key only half. A column is in the sample or is not,
however often it is used, so what lies between two of its uses is the same on a smaller scale (spatial
sampling, docs/adr/0022-reuse.md).

The log has a bound. When it is full the sample becomes half as large; or, where it reaches back far
enough, the oldest is forgotten.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from telemetry.decoder import Count

if TYPE_CHECKING:
    from swdriver_shim.cache.reasons import Tally

LOG_BYTES_MAX: Final = 512 << 10  # of an org
CHUNK_BYTES: Final = 4 << 10  # is thinned out in one go: a quarter of a millisecond
SPAN_S: Final = 2 * 3600.0  # as long as it reaches back less far, rather a smaller sample
FILLED_MIN: Final = 1 / 8  # of the log: up to here it may fill at any speed,
FASTER_MAX: Final = 2.0  # then so many times as fast as would last for that span
COLUMNS_LOOKED_AT: Final = 4  # of an average prompt, or up to twice as many
STRIDE_MAX: Final = 256
_THRESHOLD_BYTES: Final = 4
ALL_KEYS: Final = 1 << 8 * _THRESHOLD_BYTES
KEY_BYTES: Final = 8
DEPTH_MAX: Final = 0x7FFF
TIME_MAX_S: Final = 1 << 33
_TAIL: Final = 0x8000
_ABOVE_ALL: Final = b"\xff" * 17
_HEAD: Final = struct.Struct("<BHdI")
_COUNTS: Final = struct.Struct("<IQQQ")
_REFERENCE: Final = struct.Struct(f"<{KEY_BYTES}sH")


class Kind(IntEnum):
    MATCH = 0
    STORE = 1  # of a path
    MORE = 2  # the path of the match before is stored, and goes on


class Reference(NamedTuple):
    """A column of the sample, in somebody's prompt."""

    key: bytes
    depth: int
    tail: bool = False


class Event(NamedTuple):
    """`path`: its columns of the sample, in order; of `MORE` those that follow. `length`: whole columns
    of the prompt. With a match so many of them were found, and what the org had asked for since the
    start: tokens, whole columns, and tokens that were hit."""

    kind: Kind
    at: float
    path: Sequence[Reference]
    length: int
    found: int = 0
    requested: int = 0
    columns: int = 0
    hit: int = 0


class Share(NamedTuple):
    """Which columns are in a sample: of every so many in a prompt one is looked at, and is taken if its
    key is below a threshold. A smaller share is a part of every larger one."""

    stride: int = 1
    threshold: int = ALL_KEYS

    @property
    def of_all(self) -> float:
        return self.threshold / ALL_KEYS / self.stride

    @property
    def offset(self) -> int:
        """Of the first that is looked at: about the middle, so that prompts of any length are done
        justice to; and one that a smaller stride looks at, too."""
        return sum(bit for bit in (1, 4, 16, 64) if 2 * bit <= self.stride)

    @property
    def limit(self) -> bytes:
        """Above the keys, whole or half, that are taken."""
        is_all = self.threshold == ALL_KEYS
        return _ABOVE_ALL if is_all else self.threshold.to_bytes(_THRESHOLD_BYTES, "big")

    def less(self, columns: float) -> Share:
        """Half as much. `columns`: of an average prompt; of long ones fewer are looked at."""
        if columns >= 2 * COLUMNS_LOOKED_AT * self.stride and self.stride < STRIDE_MAX:
            return Share(2 * self.stride, self.threshold)
        return Share(self.stride, max(1, self.threshold // 2))


class Sample(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one driver knows of how an org comes back. Times are of its clock."""

    org: str
    now: Annotated[float, Meta(ge=0, lt=TIME_MAX_S)]
    complete: bool  # nothing has been forgotten
    stride: Annotated[int, Meta(ge=1, le=STRIDE_MAX)]
    threshold: Annotated[int, Meta(ge=1, le=ALL_KEYS)]
    requests: Count  # since the start, as are
    requested: Count  # tokens,
    columns: Count  # whole ones, and
    hit: Count  # tokens
    held_bytes: Count  # what the org has in memory
    room_bytes: Count  # what it could have: that, and what is free
    column_bytes: Annotated[int, Meta(ge=1, le=1 << 50)]
    log: Annotated[bytes, Meta(max_length=2 * LOG_BYTES_MAX)]

    @property
    def share(self) -> Share:
        return Share(self.stride, self.threshold)

    def events(self) -> list[Event]:
        """Raises ValueError for a log that is none."""
        return fewer(read(self.log), self.share)


class Recorder:
    """Writes the sample of one org. Most calls look at a few keys, and that is all."""

    __slots__ = (
        "_chunks",
        "_last",
        "_limit",
        "_match",
        "_offset",
        "_requests",
        "_stride",
        "_unthinned",
        "bytes",
        "columns",
        "complete",
        "share",
    )

    def __init__(self) -> None:
        self.columns = 0  # whole ones that were asked for
        self.complete = True
        self.bytes = 0
        self._chunks: list[bytearray] = [bytearray()]  # oldest first
        self._unthinned = 0  # of these, which the share was larger for
        self._last = 0.0  # clocks may step back; this does not
        self._match: list[bytes] | None = None  # what the last event was, if it was a match
        self._requests = 0
        self._take(Share())

    def matched(self, keys: Sequence[bytes], tokens: int, tally: Tally, now: float) -> None:
        """These columns were asked for, and so many tokens are hit. They are in the tally already."""
        self._requests += 1
        self.columns += len(keys)
        limit, looked_at = self._limit, keys[self._offset :: self._stride]
        if picked := [key for key in looked_at if key < limit]:
            found = tokens // COLUMN_TOKENS
            counts = _COUNTS.pack(found, tally.requested, self.columns, tally.hits.total())
            self._write(Kind.MATCH, now, len(keys), self._packed(looked_at, picked), counts)
        self._match = picked

    def stored(self, prompt: Prompt, verified: int, now: float) -> None:
        """So many of its tokens are stored now, or have been before."""
        whole, rest = divmod(verified, COLUMN_TOKENS)
        limit, looked_at = self._limit, prompt.keys[self._offset : whole : self._stride]
        picked = [key for key in looked_at if key < limit]
        before, self._match = self._match, None
        kind = Kind.STORE
        if before and picked[: len(before)] == before:
            kind, picked = Kind.MORE, picked[len(before) :]
        packed = self._packed(looked_at, picked) if picked else b""
        if rest and whole % self._stride == self._offset:
            tail = prompt.tail(whole, rest)
            if tail < limit:
                packed += _REFERENCE.pack(tail[:KEY_BYTES], min(whole, DEPTH_MAX) | _TAIL)
        if packed or kind is Kind.MORE:
            self._write(kind, now, whole, packed)

    @property
    def log(self) -> bytes:
        return b"".join(self._chunks)

    def forget(self) -> None:
        """Keys of what was purged do not stay here. The share does: traffic will be much the same."""
        self._chunks, self._unthinned, self.bytes = [bytearray()], 0, 0
        self._match, self.complete = None, False

    def _take(self, share: Share) -> None:
        self.share = share
        self._limit, self._offset, self._stride = share.limit, share.offset, share.stride

    def _packed(self, looked_at: Sequence[bytes], picked: Sequence[bytes]) -> bytes:
        """References to those that were picked of these."""
        stride, offset, place = self._stride, self._offset, -1
        packed = b""
        for key in picked:
            place = looked_at.index(key, place + 1)
            depth = min(place * stride + offset, DEPTH_MAX)
            packed += key[:KEY_BYTES] + depth.to_bytes(2, "little")
        return packed

    def _write(
        self, kind: Kind, now: float, length: int, references: bytes, counts: bytes = b""
    ) -> None:
        self._last = max(self._last, now)
        chunk = self._chunks[-1]
        if len(chunk) >= CHUNK_BYTES and kind is not Kind.MORE:  # which stays with its match
            if not self._unthinned:
                self._bound()
            chunk = bytearray()
            self._chunks.append(chunk)
        head = _HEAD.pack(kind, len(references) // _REFERENCE.size, self._last, length)
        chunk += head + counts + references
        self.bytes += len(head) + len(counts) + len(references)
        if self._unthinned:
            self._thin_one()

    def _bound(self) -> None:
        """Forget the oldest, or take a smaller share and thin the log out: a chunk with each event from
        here on. Also where the log is filling so fast that it would have to be thinned out soon, again
        and again."""
        span = self._last - next(read(self._chunks[0])).at
        is_full = self.bytes >= LOG_BYTES_MAX
        if is_full and (span >= SPAN_S or self.share.threshold == 1):
            self.bytes -= len(self._chunks.pop(0))
            self.complete = False
        elif is_full or self.bytes / LOG_BYTES_MAX > max(FILLED_MIN, FASTER_MAX * span / SPAN_S):
            self._take(self.share.less(self.columns / max(1, self._requests)))
            self._unthinned = len(self._chunks)

    def _thin_one(self) -> None:
        """The newest of those that are left. What remains of it joins what follows, if it fits."""
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
    """What of it is in a smaller sample. Raises ValueError for what is no log."""
    limit, stride, offset = share.limit, share.stride, share.offset
    left, is_matched = bytearray(), False
    for kind, at, length, counts, references in _parse(log):
        kept = [one for one in references if one[0] < limit and (one[1] & DEPTH_MAX) % stride == offset]
        becomes = Kind.STORE if kind is Kind.MORE and not is_matched else kind
        if kept or becomes is Kind.MORE:
            left += _HEAD.pack(becomes, len(kept), at, length) + counts
            left += b"".join([_REFERENCE.pack(*one) for one in kept])
        is_matched = bool(kept) and kind is Kind.MATCH
    return left


def read(log: bytes | bytearray) -> Iterator[Event]:
    """Raises ValueError for what is no log."""
    for kind, at, length, counts, references in _parse(log):
        path = [Reference(key, depth & DEPTH_MAX, depth >= _TAIL) for key, depth in references]
        yield Event(kind, at, path, length, *(_COUNTS.unpack(counts) if counts else ()))


def fewer(events: Iterable[Event], share: Share) -> list[Event]:
    """What of them is in a smaller sample, as `thinned` has it."""
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


_Parsed = tuple[Kind, float, int, bytes, list[tuple[bytes, int]]]


def _parse(log: bytes | bytearray) -> Iterator[_Parsed]:
    place, newest = 0, 0.0
    try:
        while place < len(log):
            number, count, at, length = _HEAD.unpack_from(log, place)
            kind = _KINDS[number]
            begin = place + _HEAD.size + (_COUNTS.size if kind is Kind.MATCH else 0)
            end = begin + count * _REFERENCE.size
            counts = bytes(log[place + _HEAD.size : begin])
            references = list(_REFERENCE.iter_unpack(log[begin:end]))
            if end > len(log):
                raise ValueError("a log of reuse ends in the middle")
            if not newest <= at < TIME_MAX_S:  # which NaN is not either
                raise ValueError("a log of reuse goes back in time, or beyond it")
            newest = at
            yield kind, at, length, counts, references
            place = end
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a log of reuse: {error}") from error


_KINDS: Final = tuple(Kind)
