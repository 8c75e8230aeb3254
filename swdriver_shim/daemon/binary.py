"""KV over HTTP: the length of a JSON header in four bytes, little-endian; the header; then the bytes,
group by group and shard by shard, each from its first token to its last; of a state group its states, in
the order of the tokens after which they are. For objects: their values in order."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from kvss_agent.documents import Invalid, decode
from kvss_agent.memory import unwritten
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import Layout

KV_BYTES_MAX: Final = 1 << 30
OCTETS: Final = "application/octet-stream"
_LENGTH: Final = struct.Struct("<I")

T = TypeVar("T")


class RunHead(Struct, frozen=True):
    """The bytes of one shard, from this token on. Of a state group: its state after so many tokens."""

    group: str
    shard: int
    first_token: int
    bytes: int


class LoadHead(Struct, frozen=True):
    """The header of a load's answer."""

    tokens: int
    parts: list[RunHead]


class ObjectsHead(Struct, frozen=True):
    """The header of a get's answer: the size of each value, null for a miss."""

    lengths: list[int | None]


class Kv:
    """The KV of so many tokens: for each group and shard the bytes of its tokens, from the `first` of
    its group on; of a state group its states after so many tokens each."""

    def __init__(
        self,
        layout: Layout,
        tokens: int,
        raw: memoryview | None = None,
        first: Sequence[int] = (),
        states: Sequence[int] | None = None,
    ) -> None:
        """Without `states` there is room for one, whichever it is. Raises Invalid if `raw` is of another
        size."""
        self._layout = layout
        self._tokens = tokens
        self._first = first or [0] * len(layout.groups)
        self._states = states
        count = 1 if states is None else len(states)
        sizes = [
            (index, shard, group.part_bytes(shard, tokens - self._first[index]))
            if not group.is_state
            else (index, shard, count * group.bytes_per_state[shard])
            for index, group in enumerate(layout.groups)
            for shard in range(group.shards)
        ]
        total = sum(size for _, _, size in sizes)
        if total > KV_BYTES_MAX:
            raise Invalid(
                f"The KV of {tokens} tokens has {total} bytes; at most {KV_BYTES_MAX} go at once."
            )
        if raw is None:
            # Not a bytearray, whose zeros are written: of a long prompt little may be there.
            raw = unwritten(total)
        if len(raw) != total:
            raise Invalid(f"The KV of {tokens} tokens has {total} bytes, not {len(raw)}.")
        self.raw = raw
        self._runs: dict[tuple[int, int], memoryview] = {}
        at = 0
        for index, shard, size in sizes:
            self._runs[index, shard] = raw[at : at + size]
            at += size

    def part(self, group: int, shard: int, depth: int, tokens: int) -> memoryview:
        of, run = self._layout.groups[group], self._runs[group, shard]
        if of.is_state:
            at = self._states.index(depth * COLUMN_TOKENS + tokens) if self._states is not None else 0
            start = at * of.bytes_per_state[shard]
        else:
            start = (depth * COLUMN_TOKENS - self._first[group]) * of.bytes_per_token[shard]
        if start < 0:
            raise RuntimeError("this KV starts after the part that is read")
        return run[start : start + of.part_bytes(shard, tokens)]

    def parts(self) -> Iterator[tuple[int, int, int, int]]:
        """Group, shard, depth and tokens of every part of a column."""
        whole, rest = divmod(self._tokens, COLUMN_TOKENS)
        for group, shard in self._runs:
            if self._layout.groups[group].is_state:
                for end in self._states or ():
                    depth = (end - 1) // COLUMN_TOKENS
                    yield group, shard, depth, end - depth * COLUMN_TOKENS
                continue
            for depth in range(-(-self._first[group] // COLUMN_TOKENS), whole + (rest > 0)):
                yield group, shard, depth, COLUMN_TOKENS if depth < whole else rest

    def encode(self, tokens: int) -> bytes:
        """Encode the first so many tokens with a header. Of a window only what is needed is included."""
        heads, runs = run_heads(self._layout, tokens), []
        for ((index, shard), run), head in zip(self._runs.items(), heads, strict=True):
            of = self._layout.groups[index]
            start = 0 if of.is_state else head.first_token * of.bytes_per_token[shard]
            runs.append(run[start : start + head.bytes])
        return pack(LoadHead(tokens=tokens, parts=heads), *runs)


def run_heads(layout: Layout, tokens: int) -> list[RunHead]:
    """The parts of a load's answer for so many tokens. Of a window only what is needed is included."""
    heads = []
    for group in layout.groups:
        first = tokens if group.is_state else group.first_needed(tokens) * COLUMN_TOKENS
        for shard in range(group.shards):
            size = group.part_bytes(shard, tokens - first) if tokens else 0
            heads.append(RunHead(group.name, shard, first, size))
    return heads


def bytes_of(layout: Layout, tokens: int) -> int:
    """Bytes of the KV of so many tokens, over all groups and shards."""
    return tokens * layout.token_bytes + (layout.state_bytes if tokens else 0)


def cut(raw: memoryview, lengths: Iterable[int]) -> list[memoryview]:
    """Split into consecutive pieces of these lengths."""
    ends = [0, *accumulate(lengths)]
    return [raw[start:end] for start, end in pairwise(ends)]


def pack(header: object, *runs: memoryview) -> bytes:
    head = msgspec.json.encode(header)
    return b"".join([_LENGTH.pack(len(head)), head, *runs])


def unpack(raw: memoryview, decoder: msgspec.json.Decoder[T]) -> tuple[T, memoryview]:
    """The JSON header, and the bytes that follow it. Raises Invalid."""
    if len(raw) < _LENGTH.size:
        raise Invalid("The body begins with the length of its header, in four bytes.")
    (length,) = _LENGTH.unpack_from(raw)
    end = _LENGTH.size + length
    if end > len(raw):
        raise Invalid(f"The header has {length} bytes; {len(raw) - _LENGTH.size} follow.")
    return decode(bytes(raw[_LENGTH.size : end]), decoder), raw[end:]
