"""A store for UCM, made by its own factory over its own interface: blocks in memory of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swdriver_shim.adapters.objects_config import Misconfigured
from tests.engines import importing
from tests.engines.store import Store, store

with importing.ucm():
    from ucm.store.factory_v1 import UcmConnectorFactoryV1

pytestmark = pytest.mark.engines

SIZES = [512, 256, 0, 1024]  # of the tensors of a shard; UCM fills layers up with empty ones
BLOCKS = [bytes([number]) * 16 for number in range(10)]


@contextlib.contextmanager
def made(told: dict[str, Any], **more: Any) -> Iterator[Any]:
    found = UcmConnectorFactoryV1.create_connector(
        "KvssStore",
        {"wait_seconds": 5, "unique_id": "engine", "variant": "r1", **told, **more},
        "swdriver_shim.adapters.ucm",
    )
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Store]:
    with store(tmp_path, sum(SIZES)) as made:
        yield made


def tensors(count: int, seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]
        for _ in range(count)
    ]


def addresses(of: list[list[torch.Tensor]]) -> list[list[int]]:
    return [[one.data_ptr() for one in row] for row in of]


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(*pair) for rows in zip(one, other, strict=True) for pair in zip(*rows, strict=True)
    )


@pytest.mark.parametrize("by", ["tensors", "addresses"])
def test_blocks_come_back_shard_by_shard(kept: Store, by: str) -> None:
    held = []  # until they are moved

    def where(of: list[list[torch.Tensor]]) -> Any:
        held.append(of)
        return of if by == "tensors" else addresses(of)

    with made(kept.at_daemon()) as scheduler, made(kept.at_daemon(), tensor_size_list=SIZES) as worker:
        dump, load = (
            (worker.dump, worker.load) if by == "tensors" else (worker.dump_data, worker.load_data)
        )
        assert scheduler.lookup(BLOCKS[:2]) == [False, False]
        assert scheduler.lookup_on_prefix(BLOCKS) == -1
        for shard in (0, 1):
            task = dump(BLOCKS[:3], [shard] * 3, where(tensors(3, shard)))
            worker.wait(task)
            assert worker.check(task)
        dump_more = dump(BLOCKS[5:6], [0], where(tensors(1, 5)))
        worker.wait(dump_more)
        assert scheduler.lookup(BLOCKS[:4]) == [True, True, True, False]
        assert scheduler.lookup_on_prefix(BLOCKS) == 2
        assert scheduler.lookup_on_reverse(BLOCKS) == 5
        assert scheduler.lookup_on_reverse(BLOCKS[6:]) == -1
        scheduler.prefetch(BLOCKS)
        for shard in (0, 1):
            rooms = tensors(3, 99)
            worker.wait(load(BLOCKS[:3], [shard] * 3, where(rooms)))
            assert same(rooms, tensors(3, shard))


def test_what_is_missed_is_an_error_that_ucm_computes_anew_and_the_rest_is_there(kept: Store) -> None:
    with made(kept.at_daemon(), tensor_size_list=SIZES) as worker:
        worker.wait(worker.dump(BLOCKS[:1], [0], tensors(1)))
        rooms = tensors(2, 9)
        task = worker.load(BLOCKS[:2], [0, 0], rooms)
        with pytest.raises(RuntimeError, match="1 of 2 blocks are not stored"):
            worker.wait(task)
        assert same(rooms[:1], tensors(1))
        with pytest.raises(RuntimeError, match="1 of 1"):
            worker.wait(worker.fetch_data(BLOCKS[:1], [7], addresses(rooms[:1])))
        assert kept.daemon is not None
        kept.daemon.stop()
        kept.daemon = None
        assert worker.lookup(BLOCKS[:1]) == [False]
        with pytest.raises(RuntimeError, match="could not be stored"):
            worker.wait(worker.dump(BLOCKS[3:4], [0], tensors(1)))


def test_blocks_that_do_not_fit_are_an_error_that_ucm_catches(kept: Store) -> None:
    with made(kept.at_daemon()) as worker:  # without the sizes it can't be told at the start
        task = worker.dump(BLOCKS[:1], [0], [[torch.zeros(1 << 16, dtype=torch.uint8)]])
        with pytest.raises(RuntimeError, match="bytes per token or more"):
            worker.wait(task)


def test_an_org_has_nothing_of_another(kept: Store) -> None:
    with made(kept.at_daemon(), tensor_size_list=SIZES) as acme, made(kept.at_daemon("globex")) as other:
        acme.wait(acme.dump(BLOCKS[:1], [0], tensors(1)))
        assert acme.lookup(BLOCKS[:1]) == [True]
        assert other.lookup(BLOCKS[:1]) == [False]


def test_stores_of_another_variant_share_nothing(kept: Store) -> None:
    """UCM's names are equal for other weights in folders of one name, and for all 8-bit types."""
    found = []
    for variant in ("llama fp8_e4m3", "llama fp8_e5m2", "llama fp8_e4m3"):
        with made(kept.at_daemon(), tensor_size_list=SIZES, variant=variant) as worker:
            found += worker.lookup(BLOCKS[:1])
            worker.wait(worker.dump(BLOCKS[:1], [0], tensors(1)))
    assert found == [False, False, True]


def test_what_can_not_be_stops_the_start(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misconfigured, match="url of a daemon"), made(kept.in_process()):
        raise AssertionError("it began")
    with pytest.raises(Misconfigured, match="Configure `variant`"), made(kept.at_daemon(), variant=""):
        raise AssertionError("it began")
    too_large = [*SIZES, 4096]
    with (
        pytest.raises(Misconfigured, match="bytes_per_token"),
        made(kept.at_daemon(), tensor_size_list=too_large),
    ):
        raise AssertionError("it began")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with (
        pytest.raises(Misconfigured, match="not in an accelerator"),
        made(kept.at_daemon(), device_id=0, tensor_size_list=SIZES),
    ):
        raise AssertionError("it began")
    with made(kept.at_daemon()) as scheduler, pytest.raises(NotImplementedError):
        scheduler.cc_store()
