"""The shape of a model's KV: cache groups, and the bytes per token of every shard of each.

    Layout((
        Group("full", bytes_per_token=(4096, 4096, 2048)),
        Group("window", bytes_per_token=(1024, 1024, 512), window=4096),
        Group("draft", bytes_per_token=(512,)),
    ))

A group is *full* if every token of a prefix is looked at, and has a *window* if only the last so many
are. Draft and target of speculative decoding are two full groups. All shards of a group keep the same
column under the same slot number, so only sums and single shards matter, never their order.

Where an engine brings keys of its own, its values are columns that stand *alone* (`objects`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvss_agent.shard.arena import slot_bytes_for
from swdriver_shim.keys import COLUMN_TOKENS

GROUPS_MAX: Final = 16
SHARDS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group. `window` is how many of the last tokens are needed; None for all. `alone`: each
    column is worth something without any other."""

    name: str
    bytes_per_token: tuple[int, ...]  # of each shard
    window: int | None = None
    alone: bool = False

    def __post_init__(self) -> None:
        if not self.name or not 0 < len(self.bytes_per_token) <= SHARDS_MAX:
            raise ValueError(f"a group has a name and 1 to {SHARDS_MAX} shards")
        if min(self.bytes_per_token) <= 0:
            raise ValueError("a shard keeps something of every token")
        if self.window is not None and self.window <= 0:
            raise ValueError("a window holds at least one token")
        if self.alone and self.window is not None:
            raise ValueError("columns that stand alone have no window")

    @property
    def linked(self) -> bool:
        """A column is worth nothing without all before it."""
        return self.window is None and not self.alone

    @property
    def column_bytes(self) -> int:
        """What a whole column takes in all shards, with headers and alignment."""
        return sum(self.slot_bytes)

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        return tuple(slot_bytes_for(each * COLUMN_TOKENS) for each in self.bytes_per_token)

    def first_needed(self, tokens: int) -> int:
        """The first column that is needed to go on after so many tokens."""
        if self.window is None or tokens <= self.window:
            return 0
        return (tokens - self.window) // COLUMN_TOKENS


@dataclass(frozen=True, slots=True)
class Layout:
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not 0 < len(names) <= GROUPS_MAX or len(set(names)) != len(names):
            raise ValueError(f"a layout has 1 to {GROUPS_MAX} groups of different names")
        if len(names) > 1 and any(group.alone for group in self.groups):
            raise ValueError("a group of columns that stand alone has a layout of its own")

    def slots_for(self, memory_bytes: int) -> int:
        """How many columns fit a grant if every group gets as many: split by bytes per token."""
        return memory_bytes // sum(group.column_bytes for group in self.groups)
