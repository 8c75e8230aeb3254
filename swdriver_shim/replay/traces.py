"""Reads the request traces that replays and benchmarks use: when each request came, and its blocks.

Two formats. *Conversations*: a file of JSON lines, in order of arrival, with `timestamp` (ms),
`input_length`, `output_length` and `hash_ids`, one for each block of 512 tokens; the last block may be
cut short. *Sessions*: a JSON file for each session, or a folder of them, with `block_size` and
`requests` of `t` (s), `in`, `out` and `hash_ids`; requests of sub-agents are nested under `requests` of
their own.
Equal ids are equal prefixes, within one file.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from telemetry.decoder import excerpt

CONVERSATION_BLOCK_TOKENS: Final = 512
NESTED_MAX: Final = 16
QUOTED_CHARACTERS_MAX: Final = 80
TOKENS_MAX: Final = 1 << 24  # of a prompt, an answer or a block


class Malformed(ValueError):
    """A trace that can't be read: which file, where, why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. Equal `blocks` have equal tokens, over all files that are read together."""

    at_s: float  # by the trace's clock, whenever that begins
    session: str  # equal for all requests of a session
    blocks: tuple[int, ...]
    block_tokens: int
    input_tokens: int
    output_tokens: int
    source: str

    @property
    def whole_blocks(self) -> int:
        """How many blocks are full; the rest is a tail."""
        return min(self.input_tokens // self.block_tokens, len(self.blocks))


def read(path: Path) -> Iterator[Request]:
    """The requests of a trace in order of arrival: a `.jsonl` of conversations, or sessions.

    Raises Malformed, also while it is read.
    """
    if path.is_dir():
        return sessions(sorted(path.glob("*.json")))
    return conversations(path) if path.suffix == ".jsonl" else sessions([path])


def conversations(path: Path) -> Iterator[Request]:
    """A file of JSON lines. A conversation is identified by its second block: the first is shared by
    all."""
    latest = 0.0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            fields = _Fields(_json(line, path, number), f"{path}, line {number}")
            at_s = fields.number("timestamp") / 1000
            if at_s < latest:
                raise Malformed(f"{path}, line {number}: earlier than the line before")
            latest = at_s
            tokens, blocks = fields.count("input_length"), fields.blocks()
            if len(blocks) != math.ceil(tokens / CONVERSATION_BLOCK_TOKENS):
                raise Malformed(f"{path}, line {number}: {len(blocks)} blocks for {tokens} tokens")
            session = str(blocks[min(1, len(blocks) - 1)]) if blocks else f"line {number}"
            yield Request(
                at_s,
                session,
                blocks,
                CONVERSATION_BLOCK_TOKENS,
                tokens,
                fields.count("output_length"),
                path.name,
            )


def sessions(paths: Sequence[Path]) -> Iterator[Request]:
    """Files of one session each, merged by time. Ids are made unique by the file's position."""
    each = [_session(path, place, len(paths)) for place, path in enumerate(paths)]
    return heapq.merge(*each, key=lambda request: request.at_s)


def tenant(session: str, tenants: int, seed: int) -> int:
    """Which of so many tenants a session belongs to. It depends on the seed only."""
    mixed = hashlib.sha256(f"{seed}\0{session}".encode()).digest()
    return int.from_bytes(mixed[:8], "little") % tenants


def _session(path: Path, place: int, places: int) -> Iterator[Request]:
    document = _Fields(_json(path.read_bytes(), path, None), str(path))
    block_tokens = document.count("block_size")
    if not block_tokens:
        raise Malformed(f"{path}: block_size is 0")
    found = sorted(_nested(document, path, 0), key=lambda fields: fields.number("t"))
    for fields in found:
        tokens = fields.count("in")
        blocks = tuple(block * places + place for block in fields.blocks())
        if len(blocks) > math.ceil(tokens / block_tokens):
            raise Malformed(f"{fields.where}: {len(blocks)} blocks for {tokens} tokens")
        at_s, out = fields.number("t"), fields.count("out")
        yield Request(at_s, path.stem, blocks, block_tokens, tokens, out, path.name)


def _nested(document: _Fields, path: Path, depth: int) -> Iterator[_Fields]:
    """All requests with blocks, including those of sub-agents."""
    if depth > NESTED_MAX:
        raise Malformed(f"{path}: sub-agents nested deeper than {NESTED_MAX}")
    for number, raw in enumerate(document.list("requests"), 1):
        fields = _Fields(raw, f"{document.where}, request {number}")
        if "hash_ids" in fields.raw:
            yield fields
        if "requests" in fields.raw:
            yield from _nested(fields, path, depth + 1)


class _Fields:
    """A JSON object whose fields are checked when they are read."""

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise Malformed(f"{where}: not a JSON object")
        self.raw: Mapping[str, Any] = raw
        self.where = where

    def number(self, name: str) -> float:
        value = self.raw.get(name)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 <= value <= sys.float_info.max
        ):
            said = excerpt(repr(value), QUOTED_CHARACTERS_MAX)
            raise Malformed(f"{self.where}: {name} is {said}, not a number from 0")
        return float(value)

    def count(self, name: str) -> int:
        """Of tokens."""
        value = self.number(name)
        if value != int(value) or value > TOKENS_MAX:
            raise Malformed(f"{self.where}: {name} is {value!r}, not a whole number up to {TOKENS_MAX}")
        return int(value)

    def list(self, name: str) -> Sequence[object]:
        value = self.raw.get(name)
        if not isinstance(value, list):
            raise Malformed(f"{self.where}: {name} is not a list")
        return value

    def blocks(self) -> tuple[int, ...]:
        blocks = tuple(self.list("hash_ids"))
        if not all(type(block) is int and block >= 0 for block in blocks):
            raise Malformed(f"{self.where}: hash_ids are whole numbers from 0")
        if len(set(blocks)) != len(blocks):
            raise Malformed(f"{self.where}: the same block twice in one prompt")
        return blocks  # type: ignore[return-value]  # checked above


def _json(raw: bytes, path: Path, line: int | None) -> object:
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise Malformed(f"{path}, line {line or 1}: nested too deep") from error
    except ValueError as error:
        at = getattr(error, "lineno", 1) if line is None else line
        raise Malformed(f"{path}, line {at}: {error}") from error
