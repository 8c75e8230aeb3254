"""The shape of a model's cache: groups of layers, and what every shard of each stores.

    Layout((
        Group("full", bytes_per_token=(4096, 4096, 2048)),
        Group("window", bytes_per_token=(1024, 1024, 512), window=4096),
        Group("draft", bytes_per_token=(512,)),
        Group("state", bytes_per_state=(1 << 20, 1 << 20, 1 << 19), tokens_per_state=1024),
    ))

To continue after a prefix, a *full* group needs every column of it, a group with a *window* the columns
of the last so many tokens, and a *state* group (Mamba, linear attention) its last column only: the state
of its layers after the whole prefix, which has the same size after 64 tokens and after a million. Draft
and target of speculative decoding are two full groups. All shards of a group keep the same column under
the same slot number, so only sums and single shards matter, never their order.

Where an engine brings keys of its own, its values are columns that stand *alone* (`objects`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvss_agent.shard.arena import slot_bytes_for
from swdriver_shim.keys import COLUMN_TOKENS

GROUPS_MAX: Final = 16
SHARDS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group. `window` is how many of the last tokens are needed; None for all. `alone`: each
    column is worth something without any other.

    A state group has `bytes_per_state` in place of bytes per token. Its engine stores one state for
    about `tokens_per_state` tokens: so many slots the group gets. The engine may store more or fewer.
    """

    name: str
    bytes_per_token: tuple[int, ...] = ()  # of each shard
    window: int | None = None
    alone: bool = False
    bytes_per_state: tuple[int, ...] = ()  # of each shard
    tokens_per_state: int = COLUMN_TOKENS

    def __post_init__(self) -> None:
        if bool(self.bytes_per_token) == bool(self.bytes_per_state):
            raise ValueError("a group has bytes per token, or bytes per state")
        if not self.name or self.shards > SHARDS_MAX:
            raise ValueError(f"a group has a name and 1 to {SHARDS_MAX} shards")
        if min(self._sizes) <= 0:
            raise ValueError("a shard keeps something of every token, or of every state")
        if self.window is not None and self.window <= 0:
            raise ValueError("a window holds at least one token")
        if self.alone and (self.window is not None or self.is_state):
            raise ValueError("columns that stand alone have no window, and are no states")
        if self.is_state and self.window is not None:
            raise ValueError("a state has no window")
        if self.tokens_per_state < COLUMN_TOKENS:
            raise ValueError(f"states are {COLUMN_TOKENS} tokens or more apart")
        if not self.is_state and self.tokens_per_state != COLUMN_TOKENS:
            raise ValueError("tokens_per_state is for state groups")

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.bytes_per_state or self.bytes_per_token

    @property
    def is_state(self) -> bool:
        """A column is the state after all tokens up to its end."""
        return bool(self.bytes_per_state)

    @property
    def linked(self) -> bool:
        """A column is worth nothing without all before it."""
        return self.window is None and not self.alone and not self.is_state

    @property
    def shards(self) -> int:
        return len(self._sizes)

    def part_bytes(self, shard: int, tokens: int) -> int:
        """What a shard keeps of a column of so many tokens."""
        return self._sizes[shard] * (1 if self.is_state else tokens)

    @property
    def column_bytes(self) -> int:
        """What a whole column takes in all shards, with headers and alignment."""
        return sum(self.slot_bytes)

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        return tuple(slot_bytes_for(self.part_bytes(at, COLUMN_TOKENS)) for at in range(self.shards))

    @property
    def columns_per_slot(self) -> int:
        """For how many columns of a prompt the group needs one slot: several, where it stores states."""
        return self.tokens_per_state // COLUMN_TOKENS

    def slots_of(self, columns: int) -> int:
        """How many slots the group needs for prompts of so many columns."""
        return -(-columns // self.columns_per_slot)

    def first_needed(self, tokens: int) -> int:
        """The first column that is needed to go on after so many tokens."""
        if self.is_state:
            return max(0, tokens - 1) // COLUMN_TOKENS
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

    @property
    def has_states(self) -> bool:
        return any(group.is_state for group in self.groups)

    @property
    def has_kv(self) -> bool:
        """Whether there are groups that are no state groups."""
        return not all(group.is_state for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """What is stored of each token, without headers and states."""
        return sum(sum(group.bytes_per_token) for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """What is stored of one state of all state groups, without headers."""
        return sum(sum(group.bytes_per_state) for group in self.groups)

    @property
    def column_bytes(self) -> int:
        """What a column of a prompt takes on average in all groups, with its part of a state."""
        return sum(-(-group.column_bytes // group.columns_per_slot) for group in self.groups)

    def slots_for(self, memory_bytes: int) -> list[int]:
        """How many slots each group gets of so much memory, for prompts of equally many columns."""
        sizes = [(group.column_bytes, group.columns_per_slot) for group in self.groups]
        columns = columns_in(memory_bytes, sizes)
        return [group.slots_of(columns) for group in self.groups]


def columns_in(memory_bytes: int, sizes: Iterable[tuple[int, int]]) -> int:
    """How many columns of prompts fit into so much memory. `sizes`: the bytes of a slot, and for how
    many columns it is."""
    sizes = list(sizes)

    def needed(columns: int) -> int:
        return sum(size * -(-columns // each) for size, each in sizes)

    most = min(memory_bytes // size * each for size, each in sizes)
    return bisect_right(range(1, most + 1), memory_bytes, key=needed)


def part_name(group: str, index: int) -> str:
    """The name of a shard's part in tier 2. It is equal for all drivers, so that they find each other's
    columns there."""
    return f"{group}.{index}"
