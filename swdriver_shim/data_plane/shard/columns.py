"""Columns as callers name them to a shard, one class for each operation but evicts: see
`kvss_agent.client.Evict`."""

from __future__ import annotations

from typing import NamedTuple


class RefillColumn(NamedTuple):
    """A column to read from a slot into this memory."""

    slot: int
    key: bytes
    tag: bytes
    tokens: int
    into: memoryview


class ViewColumn(NamedTuple):
    """A column to read in place."""

    slot: int
    key: bytes
    tag: bytes
    tokens: int


class SpillColumn(NamedTuple):
    """A column to copy from a slot to tier 2, with a note that a recall returns."""

    slot: int
    key: bytes
    tag: bytes
    note: int


class RecallColumn(NamedTuple):
    """A column to copy into a slot, from tier 2 or from a sibling."""

    slot: int
    key: bytes
    tag: bytes
