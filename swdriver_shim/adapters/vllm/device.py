"""Blocks in a device's memory, copied to and from agents through pinned memory, a layer at a time.

Copies are queued on a stream of their own, behind what the engine has queued when they were asked for;
the engine's stream waits for a layer that is loaded when it comes to it. So neither waits for the host.

One copy more than where blocks lie in the host's memory, each way: agents' memory is not registered with
the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from swdriver_shim.adapters.vllm.blocks import (
    SKIP_BLOCK,
    Blocks,
    Layer,
    Mark,
    PlacedColumn,
    Shape,
    Unsupported,
)

PINNED_FROM: Final = "cuda"  # of other devices' memory it is not known that pinning helps


def rows_of(name: str, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The bytes of a layer's blocks, a row for each: once, or of keys and of values.

    vLLM gives a layer as a view, of which the first dimension counts blocks, or the smaller blocks that
    its kernels make of each; with some kernels the second does, and the first is two.
    """
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported(f"{name} keeps something else than blocks of keys and values.")
    if tensor.dim() > 1 and tensor.shape[0] == 2 and 2 % count and tensor.shape[1] % count == 0:
        return [rows for part in tensor for rows in rows_of(name, part, count)]
    smaller, rest = divmod(tensor.shape[0], count)
    inner = tensor[0]
    each = inner.numel() * tensor.element_size()
    reach = 1 + sum((n - 1) * step for n, step in zip(inner.shape, inner.stride(), strict=True))
    stride = tensor.stride(0) * tensor.element_size()
    is_together = reach == inner.numel() and (smaller == 1 or stride == each)
    if rest or not smaller or not is_together:
        raise Unsupported(
            f"The blocks of {name} do not lie in memory as whole pieces: {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}, for {count} blocks."
        )
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return [made.set_(tensor.untyped_storage(), start, (count, each * smaller), (stride * smaller, 1))]


class DeviceLayer:
    """One layer's blocks: a row of bytes for each."""

    def __init__(self, name: str, rows: torch.Tensor) -> None:
        """`rows` is a view of the engine's own memory."""
        if rows.dim() != 2 or rows.dtype != torch.uint8 or (rows.shape[1] > 1 and rows.stride(1) != 1):
            raise ValueError("a layer's blocks are rows of bytes")
        self.name = name
        self.rows = rows

    @property
    def size(self) -> int:
        return int(self.rows.shape[1])


class DeviceBlocks:
    """The blocks of one group on one device. As `Blocks`, which are in the host's memory."""

    def __init__(
        self, layers: Sequence[DeviceLayer], block_tokens: int, unit: int, *, is_state: bool = False
    ) -> None:
        """Raises Unsupported."""
        self.layers = layers
        self.shape = Shape(tuple(layer.size for layer in layers), block_tokens, unit, is_state)
        self._device = layers[0].rows.device
        self._has_streams = self._device.type != "cpu"
        self._stream = torch.Stream(self._device) if self._has_streams else None

    def mark(self) -> Mark:
        """What the calling thread's stream has been given so far."""
        if not self._has_streams:
            return None
        return torch.accelerator.current_stream(self._device).record_event()

    def follow(self, mark: Mark) -> None:
        """Let the calling thread's stream go on when that is done."""
        if mark is not None:
            torch.accelerator.current_stream(self._device).wait_event(mark)

    def wait(self, mark: Mark) -> None:
        """Return when that is done."""
        if mark is not None:
            mark.synchronize()

    @contextlib.contextmanager
    def near(self, blocks: Sequence[int], mark: Mark) -> Iterator[tuple[Blocks, dict[int, int]]]:
        """These blocks, as they are behind `mark`, in the host's memory; and where each is there."""
        wanted = sorted(set(blocks))
        there, parts = self.index(wanted), []
        with self._behind(mark):
            for layer in self.layers:
                rows = self._rows(len(wanted), layer.size)
                rows.copy_(layer.rows.index_select(0, there), non_blocking=True)
                parts.append(rows)
        if self._stream is not None:
            self._stream.synchronize()
        yield self.staged(parts), {block: place for place, block in enumerate(wanted)}

    def landing(self, mark: Mark) -> Landing:
        """Where columns are put first. Blocks are written behind `mark`."""
        return Landing(self, mark)

    @contextlib.contextmanager
    def _behind(self, mark: Mark) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with self._stream:
            if mark is not None:
                self._stream.wait_event(mark)
            yield

    def _rows(self, count: int, size: int) -> torch.Tensor:
        pinned = self._device.type == PINNED_FROM
        return torch.empty((count, size), dtype=torch.uint8, pin_memory=pinned)

    def put(self, layer: int, there: torch.Tensor, rows: torch.Tensor, mark: Mark) -> Mark:
        """Write blocks of a layer, behind `mark`."""
        with self._behind(mark):
            on_device = rows.to(self._device, non_blocking=True)
            self.layers[layer].rows.index_copy_(0, there, on_device)
            return self._stream.record_event() if self._stream is not None else None

    def index(self, blocks: Sequence[int]) -> torch.Tensor:
        """On the device, for copies on our stream. It is allocated on that, too: once it is dropped, its
        memory is used again behind the copies that are queued, and not while they read it."""
        pinned = self._device.type == PINNED_FROM
        made = torch.tensor(blocks, dtype=torch.int64, pin_memory=pinned)
        with self._behind(None):
            return made.to(self._device, non_blocking=True)

    def staged(self, rows: Sequence[torch.Tensor]) -> Blocks:
        """Some blocks of this group in the host's memory, as rows of each layer."""
        return Blocks(
            [_host(of.name, each) for of, each in zip(self.layers, rows, strict=True)],
            self.shape.block_tokens,
            self.shape.unit_tokens,
            is_state=self.shape.is_state,
        )

    def host(self, count: int) -> list[torch.Tensor]:
        """Of each layer, memory for so many blocks."""
        return [self._rows(count, layer.size) for layer in self.layers]


class Landing:
    """Columns on their way into blocks. They are staged layer by layer: a device computes with the first
    while the others are still on their way."""

    def __init__(self, blocks: DeviceBlocks, mark: Mark) -> None:
        self._blocks = blocks
        self._mark = mark
        self._columns: list[PlacedColumn] = []
        self._staging: Staging | None = None

    def take(self, columns: Sequence[PlacedColumn]) -> None:
        self._columns += columns

    def flush(self, layer: int) -> Mark:
        if self._staging is None:
            self._staging = Staging(self._blocks, self._columns)
        return self._staging.put(layer, self._mark)


class Staging:
    """Memory of the host for the blocks that columns go to."""

    def __init__(self, blocks: DeviceBlocks, columns: Sequence[PlacedColumn]) -> None:
        wanted = sorted({block for one in columns for block in one.blocks} - {SKIP_BLOCK})
        places = {block: place for place, block in enumerate(wanted)} | {SKIP_BLOCK: SKIP_BLOCK}
        self._blocks = blocks
        self._columns = [
            one._replace(blocks=tuple(places[block] for block in one.blocks)) for one in columns
        ]
        self._rows = blocks.host(len(wanted))
        self._there = blocks.index(wanted)
        self._here = blocks.staged(self._rows)

    def put(self, layer: int, mark: Mark) -> Mark:
        self._here.scatter(layer, self._columns)
        return self._blocks.put(layer, self._there, self._rows[layer], mark)


def _host(name: str, rows: torch.Tensor) -> Layer:
    memory = memoryview(rows.numpy()).cast("B") if len(rows) else memoryview(bytearray())
    return Layer(name, memory, 0, rows.shape[1], rows.shape[1])
