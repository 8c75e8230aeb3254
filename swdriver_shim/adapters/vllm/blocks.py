"""The layout of columns in an engine's blocks.

An engine keeps each layer's KV in blocks of some number of tokens, and only it understands the bytes of
one: on some machines keys are packed so that no token's could be cut out. So blocks are taken whole. A
*unit* is the least number of tokens that are both whole blocks and whole columns; its bytes are those of
its blocks, layer by layer, and each of its columns has an equal part of them.

    blocks of 16: a unit is one column, of four blocks     blocks of 48: of three columns, and four
    blocks blocks of 64: of one column, and one block             blocks of 128: of two columns, and one
    block

Layer by layer, so that a load to a device can fill the first layers before the last.

Layers of Mamba and linear attention keep a *state* of all tokens so far in a block. A column of such a
group is a whole block: the state after the last token of a unit.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, cast

from kvss_agent import native
from kvss_agent.mover import PYTHON
from swdriver_shim.keys import COLUMN_TOKENS, UNIT_TOKENS_MAX

if TYPE_CHECKING:
    from kvss_agent.mover import Mover
    from kvss_agent.native import NativeMover

Mark: TypeAlias = Any  # a point in a device's work; None where there is nothing to wait for

SKIP_BLOCK: Final = -1  # instead of a block's number: leave the block as it is


class Unsupported(Exception):
    """The engine's KV can't be stored. A sentence."""


def unit_tokens(block_tokens: Sequence[int]) -> int:
    """Of blocks of these sizes. Raises Unsupported."""
    unit = math.lcm(COLUMN_TOKENS, *block_tokens)
    if unit > UNIT_TOKENS_MAX:
        raise Unsupported(
            f"Blocks of {' and '.join(map(str, block_tokens))} tokens and columns of {COLUMN_TOKENS} "
            f"have no common border within {UNIT_TOKENS_MAX} tokens. Choose another --block-size."
        )
    return unit


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's blocks in memory: block n has `size` bytes from `start + n * stride` on."""

    name: str
    memory: memoryview
    start: int
    stride: int
    size: int

    def __post_init__(self) -> None:
        if not 0 < self.size <= self.stride or self.start < 0:
            raise ValueError("the blocks of a layer do not overlap")

    @property
    def count(self) -> int:
        return (len(self.memory) - self.start - self.size) // self.stride + 1

    def part(self, block: int, at: int, size: int) -> memoryview:
        """So many bytes of a block. Raises IndexError where there is no such block."""
        if not 0 <= block < self.count:
            raise IndexError(f"block {block} of {self.count}")
        first = self.start + block * self.stride + at
        return self.memory[first : first + size]


class Piece(NamedTuple):
    """Bytes of a column that lie together in a block."""

    layer: int
    block: int  # of the unit's blocks
    at: int  # in the block
    place: int  # in the column
    size: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one group: the bytes of a block in each of its layers, and how columns are cut from units. Of a
    state group a unit has one column, which is one block."""

    sizes: tuple[int, ...]
    block_tokens: int
    unit_tokens: int
    # Not in its name: what was stored of models without states keeps its own (`connector._layout`).
    is_state: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.unit_tokens % self.block_tokens or self.unit_tokens % COLUMN_TOKENS:
            raise ValueError("a unit has whole blocks and whole columns")
        if self.block_bytes % self.block_tokens and not self.is_state:
            raise Unsupported(
                f"A block of {self.block_tokens} tokens has {self.block_bytes} bytes, which is not the "
                "same number for each token."
            )

    @property
    def block_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def bytes_per_token(self) -> int:
        """0 of states, which have the same size after any number of tokens."""
        return 0 if self.is_state else self.block_bytes // self.block_tokens

    @property
    def bytes_per_state(self) -> int:
        return self.block_bytes if self.is_state else 0

    @property
    def column_bytes(self) -> int:
        return self.bytes_per_state or self.bytes_per_token * COLUMN_TOKENS

    @property
    def unit_blocks(self) -> int:
        """That hold something of a unit."""
        return 1 if self.is_state else self.unit_tokens // self.block_tokens

    @property
    def unit_columns(self) -> int:
        return 1 if self.is_state else self.unit_tokens // COLUMN_TOKENS

    def pieces(self) -> list[list[Piece]]:
        """Of each column of a unit, in the order of its bytes."""
        made: list[list[Piece]] = [[] for _ in range(self.unit_columns)]
        place = 0  # in the unit
        for layer, size in enumerate(self.sizes):
            for block in range(self.unit_blocks):
                at = 0
                while at < size:
                    column, inside = divmod(place, self.column_bytes)
                    some = min(size - at, self.column_bytes - inside)
                    made[column].append(Piece(layer, block, at, inside, some))
                    at, place = at + some, place + some
        return made


class PlacedColumn(NamedTuple):
    """A column's bytes and where blocks have them: its part of the unit, and the unit's blocks."""

    part: int
    blocks: tuple[int, ...]
    column: memoryview


class Landing(Protocol):
    """Where columns go that are loaded into blocks."""

    def take(self, columns: Sequence[PlacedColumn]) -> None:
        """Bring these in. Their bytes stay as they are until the last flush. From any thread."""

    def flush(self, layer: int) -> Mark:
        """All columns have been taken. When the mark is reached, this layer of them is in the blocks."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


class BlockGroup(Protocol):
    """The blocks of one group, wherever one worker has them: `Blocks`, or `device.DeviceBlocks`."""

    @property
    def layers(self) -> Sequence[Named]: ...
    @property
    def shape(self) -> Shape: ...
    def mark(self) -> Mark: ...
    def follow(self, mark: Mark) -> None: ...
    def wait(self, mark: Mark) -> None: ...
    def near(
        self, blocks: Sequence[int], mark: Mark
    ) -> contextlib.AbstractContextManager[tuple[Blocks, Mapping[int, int]]]: ...
    def landing(self, mark: Mark) -> Landing: ...


class Blocks:
    """The blocks of one group, in the host's memory."""

    def __init__(
        self, layers: Sequence[Layer], block_tokens: int, unit: int, *, is_state: bool = False
    ) -> None:
        """Raises Unsupported."""
        self.layers = layers
        self.shape = Shape(tuple(layer.size for layer in layers), block_tokens, unit, is_state)
        self._pieces = self.shape.pieces()
        self._of_layer = [
            [[piece for piece in pieces if piece.layer == index] for pieces in self._pieces]
            for index in range(len(layers))
        ]
        self._memories = [(of.memory, of.start, of.stride, of.count) for of in layers]
        self._compiled: NativeMover | None = None
        native.follow(self)

    def use_mover(self, mover: Mover) -> None:
        """Copy with this mover from now on, if it is the compiled one."""
        self._compiled = None if mover is PYTHON else cast("NativeMover", mover)

    def mark(self) -> None:
        """What a device has been given so far (`device`). Here, all of it is done."""

    def follow(self, mark: Mark) -> None:
        """What is given to the device from here on goes on when that is done."""

    def wait(self, mark: Mark) -> None:
        """Return when that is done."""

    @contextlib.contextmanager
    def near(self, blocks: Sequence[int], mark: Mark) -> Iterator[tuple[Blocks, Mapping[int, int]]]:
        """These blocks as they are behind `mark`, in the host's memory; and where each is there."""
        del mark
        yield self, {block: block for block in blocks}

    def landing(self, mark: Mark) -> Landing:
        """Where columns are put first: here at once where they belong."""
        del mark
        return self

    def take(self, columns: Sequence[PlacedColumn]) -> None:
        """All layers of these columns to where they belong, while a cache still has what was checked."""
        self._scatter(self._pieces, columns)

    def flush(self, layer: int) -> Mark:
        """It is in the blocks already."""

    def scatter(self, layer: int, columns: Sequence[PlacedColumn]) -> None:
        """One layer of these columns to where it belongs, but for the blocks that are to be left."""
        self._scatter(self._of_layer[layer], columns)

    def gather(self, columns: Sequence[PlacedColumn]) -> None:
        """Copy these columns from blocks into their memory."""
        if self._compiled:
            self._compiled.gather_columns(self._memories, self._pieces, columns)
            return
        for part, blocks, column in columns:
            for layer, block, at, place, size in self._pieces[part]:
                column[place : place + size] = self.layers[layer].part(blocks[block], at, size)
            time.sleep(0)  # let the threads that compute run

    def _scatter(self, pieces: Sequence[Sequence[Piece]], columns: Sequence[PlacedColumn]) -> None:
        if self._compiled:
            self._compiled.scatter_columns(self._memories, pieces, columns)
            return
        for part, blocks, column in columns:
            for layer, block, at, place, size in pieces[part]:
                if blocks[block] != SKIP_BLOCK:
                    self.layers[layer].part(blocks[block], at, size)[:] = column[place : place + size]
