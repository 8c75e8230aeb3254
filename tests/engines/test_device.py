"""Blocks in a device's memory, as far as they can be tried where there is none: the same code on the
CPU's, and what it does is what the host's `Blocks` do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvss_agent.mover import PYTHON
from kvss_agent.native import selection
from swdriver_shim.adapters.vllm.blocks import (
    SKIP_BLOCK,
    Blocks,
    Layer,
    PlacedColumn,
    Unsupported,
    unit_tokens,
)
from tests.kvss_agent.compiled import COMPILER, built

pytestmark = pytest.mark.engines
torch: Any = pytest.importorskip("torch")

COUNT = 12


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built(tmp_path_factory.mktemp("native"), COMPILER)


@pytest.fixture(autouse=True, params=["python", "compiled"])
def _mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What blocks are copied with that are made from here on."""
    chosen = PYTHON if request.param == "python" else request.getfixturevalue("compiled")
    monkeypatch.setattr(selection, "_mover", chosen)


def banks(block_tokens: int, layers: int, seed: int) -> tuple[Any, Blocks, list[Any]]:
    """The same bytes twice: as a device's, and as the host's."""
    from swdriver_shim.adapters.vllm.device import DeviceBlocks, DeviceLayer

    numbers, unit = random.Random(seed), unit_tokens([block_tokens])
    rows, host = [], []
    for index in range(layers):
        size, gap = block_tokens * (index + 1), 3 * index
        raw = numbers.randbytes(COUNT * (size + gap))
        whole = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(COUNT, size + gap)
        rows.append(whole[:, :size])
        host.append(Layer(str(index), memoryview(bytearray(raw)), 0, size + gap, size))
    device = DeviceBlocks(
        [DeviceLayer(str(index), one) for index, one in enumerate(rows)], block_tokens, unit
    )
    return device, Blocks(host, block_tokens, unit), rows


@pytest.mark.parametrize("block_tokens", [16, 48, 64, 128])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_near_is_what_lies_there(block_tokens: int, seed: int) -> None:
    device, host, _ = banks(block_tokens, 3, seed)
    shape = host.shape
    assert device.shape == shape
    numbers = random.Random(seed)
    blocks = numbers.sample(range(COUNT), shape.unit_blocks)
    more = [*blocks, *numbers.sample(range(COUNT), 2)]
    with device.near(more, device.mark()) as (here, places):
        for part in range(shape.unit_columns):
            got, wanted = bytearray(shape.column_bytes), bytearray(shape.column_bytes)
            there = tuple(places[block] for block in blocks)
            here.gather([PlacedColumn(part, there, memoryview(got))])
            host.gather([PlacedColumn(part, tuple(blocks), memoryview(wanted))])
            assert got == wanted


@pytest.mark.parametrize("block_tokens", [16, 48, 64, 128])
@pytest.mark.parametrize("seed", range(5))
def test_what_has_landed_is_in_its_blocks_and_nowhere_else(block_tokens: int, seed: int) -> None:
    device, host, rows = banks(block_tokens, 3, seed)
    shape, numbers = host.shape, random.Random(seed)
    blocks = numbers.sample(range(COUNT), shape.unit_blocks)
    if len(blocks) > 1:
        blocks[0] = SKIP_BLOCK
    landing = device.landing(device.mark())
    columns = [
        PlacedColumn(part, tuple(blocks), memoryview(numbers.randbytes(shape.column_bytes)))
        for part in range(shape.unit_columns)
    ]
    for column in columns:
        landing.take([column])
    host.take(columns)
    for layer in range(3):
        mark = landing.flush(layer)
        device.follow(mark)
        device.wait(mark)
        for block in range(COUNT):
            there = bytes(rows[layer][block].tolist())
            assert there == host.layers[layer].part(block, 0, host.layers[layer].size)


def test_nothing_to_land_is_nothing() -> None:
    device, _, rows = banks(16, 2, 1)
    before = [one.clone() for one in rows]
    landing = device.landing(device.mark())
    landing.take([])
    device.wait(landing.flush(0))
    assert all(torch.equal(one, other) for one, other in zip(rows, before, strict=True))


class FakeStream:
    """Knows what is queued on it. Torch allocates a tensor on the stream that is current."""

    def __init__(self) -> None:
        self.is_current = False

    def __enter__(self) -> None:
        self.is_current = True

    def __exit__(self, *_: object) -> None:
        self.is_current = False

    def record_event(self) -> None: ...

    def synchronize(self) -> None: ...


def test_what_is_allocated_on_the_device_is_allocated_on_the_stream_that_reads_it() -> None:
    """Else torch gives its memory to others once it is dropped, while copies that read it are queued."""
    from torch.overrides import TorchFunctionMode

    device, _, _ = banks(16, 2, 1)
    stream = device._stream = FakeStream()
    moved: list[bool] = []

    class Watch(TorchFunctionMode):  # type: ignore[misc]  # which mypy does not see
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.to or kwargs.get("device") is not None:
                moved.append(stream.is_current)
            return func(*args, **kwargs)

    with Watch():
        landing = device.landing(None)
        landing.take([PlacedColumn(0, (1, 2, 3, 4), memoryview(bytes(device.shape.column_bytes)))])
        for layer in range(2):
            landing.flush(layer)
        with device.near([1, 2], None):
            pass
    assert moved == [True] * 4  # two indices, and the rows of two layers


def test_rows_are_found_in_every_layout_that_kernels_have() -> None:
    from swdriver_shim.adapters.vllm.device import rows_of

    flat = torch.arange(2 * 6 * 4 * 8, dtype=torch.int16)
    [one] = rows_of("x", flat.view(12, 4, 8), 12)
    assert one.shape == (12, 64)
    assert bytes(one[1].tolist()) == flat[32:64].numpy().tobytes()
    [smaller] = rows_of("x", flat.view(12, 4, 8), 4)  # kernels' blocks, three to each of the engine's
    assert bytes(smaller[1].tolist()) == flat[96:192].numpy().tobytes()
    keys, values = rows_of("x", flat.view(2, 6, 4, 8), 6)
    assert bytes(keys[2].tolist()) == flat[64:96].numpy().tobytes()
    assert bytes(values[2].tolist()) == flat[192 + 64 : 192 + 96].numpy().tobytes()
    beside = flat.view(6, 2, 4, 8)[:, 1]  # two layers' blocks beside each other
    [one] = rows_of("x", beside, 6)
    assert bytes(one[1].tolist()) == flat[96:128].numpy().tobytes()
    with pytest.raises(Unsupported, match="whole pieces"):
        rows_of("x", flat.view(4, 12, 8).transpose(0, 1), 12)
