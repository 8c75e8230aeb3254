"""SGLang's own host pools and factory over a driver: pages go out, and come back as they were."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swdriver_shim.adapters.objects_config import Misconfigured
from tests.engines import importing
from tests.engines.store import Store, store
from tests.live import wait_until

with importing.sglang():
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from swdriver_shim.adapters.sglang import rank_of

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),  # the engine's own, when it is imported
]

LAYERS, PAGE, HEADS, WIDTH, CAPACITY = 3, 16, 2, 32, 256
MLA_WIDTH = 48 + 16
VALUE_BYTES = 2 * LAYERS * PAGE * HEADS * WIDTH * 2
PAGES = [f"{number:064x}" for number in range(1, 30)]  # SGLang's names: SHA-256 in hex


def mha(layout: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A host pool of bfloat16 keys and values, over device buffers on the CPU."""
    sides = [
        tuple(torch.zeros(CAPACITY, HEADS, WIDTH, dtype=dtype) for _ in range(LAYERS)) for _ in "kv"
    ]
    pointers = [torch.tensor([one.data_ptr() for one in side], dtype=torch.uint64) for side in sides]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=sides[0],
            v=sides[1],
            k_data_ptrs=pointers[0],
            v_data_ptrs=pointers[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=CAPACITY,
        start_layer=0,
        end_layer=LAYERS,
    )


def mla(layout: str) -> Any:
    rows = tuple(torch.zeros(CAPACITY, 1, MLA_WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([one.data_ptr() for one in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        kv_cache_dim=MLA_WIDTH,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=CAPACITY,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


@contextlib.contextmanager
def backend(pool: Any, told: dict[str, Any], **of: Any) -> Iterator[Any]:
    """As SGLang's controller makes it, for one rank."""
    usual = {
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": pool.layout != "layer_first",
        "model_name": "org/llama",
    }
    extra = {
        "backend_name": "kvss",
        "module_path": "swdriver_shim.adapters.sglang",
        "class_name": "KvssStorage",
        "wait_seconds": 5,
        "variant": "r1",
        **told,
    }
    config = HiCacheStorageConfig(**{**usual, **of}, extra_config=extra)
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    try:
        made.register_mem_pool_host(pool)
        made.on_host_pools_registered()
        yield made
    finally:
        made.close()


def at(*pages: int) -> torch.Tensor:
    """The token slots of these pages of a pool."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def fill(pool: Any, seed: int = 0) -> None:
    made = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**8, pool.kv_buffer.shape, generator=made, dtype=torch.int64)
    pool.kv_buffer.copy_(values.to(pool.dtype))


def page(pool: Any, number: int) -> torch.Tensor:
    return pool.get_data_page(number * PAGE, flat=True).clone()


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang wants 10 GB to be left to others."""
    budget = "sglang.srt.mem_cache.pool_host.base.host_memory_budget_bytes"
    monkeypatch.setattr(budget, lambda wanted: wanted)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Store]:
    with store(tmp_path, VALUE_BYTES, slots=60) as made:
        yield made


def server(**more: Any) -> SimpleNamespace:
    """What is looked at of a server's arguments."""
    names = ("revision", "quantization", "json_model_override_args", "download_dir")
    usual = dict.fromkeys(names)
    return SimpleNamespace(
        **{**usual, "model_path": "org/llama", "kv_cache_dtype": "auto", "dtype": "bfloat16", **more}
    )


@pytest.fixture(autouse=True)
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As if a server with these arguments were in this process, from here on."""

    def begin(**more: Any) -> None:
        of = server(**more)
        monkeypatch.setattr("swdriver_shim.adapters.sglang.get_server_args", lambda: of)

    begin()
    return begin


LAYOUTS = [
    *[(mha, layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")],
    *[(mla, layout) for layout in ("layer_first", "page_first", "page_first_direct")],
]


def test_servers_that_understand_bytes_in_another_way_share_nothing(
    kept: Store, serve: Callable[..., None]
) -> None:
    """A pool of 8-bit numbers says of all kinds that they are bytes."""
    told, found = kept.at_daemon(), []
    for kind in ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3"):
        serve(kv_cache_dtype=kind)
        pool = mha("page_first", torch.uint8)
        with backend(pool, told) as one:
            found.append(one.batch_exists(PAGES[:1]))
            assert one.batch_set_v1(PAGES[:1], at(0)) == [True]
    assert found == [0, 0, 1]


def test_servers_of_other_weights_share_nothing_under_one_name(
    kept: Store, serve: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are served as one `model_name`."""
    began = "swdriver_shim.adapters.objects_config.process_began"
    monkeypatch.setattr(began, time.time_ns)  # later than files
    served: list[dict[str, Any]] = [{"revision": "r1"}, {"revision": "r2"}]
    for name in ("base", "tuned"):
        (tmp_path / name / "llama").mkdir(parents=True)
        file = tmp_path / name / "llama" / "model.safetensors"
        file.write_bytes(name.encode().ljust(8))
        os.utime(file, ns=(0, 0))
        served.append({"model_path": str(file.parent)})
    served.append({**served[-1], "json_model_override_args": '{"rope_theta": 1}'})
    found = []
    for one in [*served, *served]:
        serve(**one)
        with backend(mha("page_first"), kept.at_daemon()) as storage:
            found.append(storage.batch_exists(PAGES[:1]))
            assert storage.batch_set_v1(PAGES[:1], at(0)) == [True]
    assert found == [0] * len(served) + [1] * len(served)


@pytest.mark.parametrize("where", ["download_dir", "cache"])
def test_servers_of_other_commits_of_a_repository_share_nothing(
    kept: Store, serve: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As SGLang has downloaded them, with nothing but weights."""
    hub = tmp_path / "hub"
    if where == "cache":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    serve(download_dir=str(hub) if where == "download_dir" else str(tmp_path / "empty"))
    repository, found = hub / "models--org--llama", []
    (repository / "refs").mkdir(parents=True)
    told = {**kept.at_daemon(), "variant": ""}
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (repository / "snapshots" / commit / "model.safetensors").touch()
        (repository / "refs" / "main").write_text(commit)
        with backend(mha("page_first"), told) as storage:
            found.append(storage.batch_exists(PAGES[:1]))
            assert storage.batch_set_v1(PAGES[:1], at(0)) == [True]
    assert found == [0, 0, 1]


def test_a_repository_whose_commit_is_not_known_needs_a_variant(kept: Store) -> None:
    with (
        pytest.raises(Misconfigured, match="which commit of org/llama SGLang has loaded"),
        backend(mha("page_first"), {**kept.at_daemon(), "variant": ""}),
    ):
        pass


def test_no_two_ranks_are_in_the_same_directory() -> None:
    names = ("tp_rank", "pp_rank", "attn_cp_rank", "dp_rank")
    usual = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    sizes = {"tp_size": 2, "pp_size": 2, "attn_cp_size": 2, "model_name": "m"}
    every = [
        HiCacheStorageConfig(**usual, **sizes, **dict(zip(names, ranks, strict=True)))
        for ranks in itertools.product(range(2), range(2), range(2), range(3))
    ]
    assert len({rank_of(one) for one in every}) == 24
    alone = HiCacheStorageConfig(**usual, **sizes, tp_rank=1, pp_rank=1, attn_cp_rank=0)
    assert rank_of(alone) == 3


@pytest.mark.parametrize(("make", "layout"), LAYOUTS)
@pytest.mark.parametrize("where", ["process", "daemon"])
def test_pages_come_back_into_other_places_of_the_pool(
    kept: Store, make: Any, layout: str, where: str
) -> None:
    pool = make(layout)
    fill(pool)
    before = [page(pool, number) for number in range(4)]
    told = {**kept.told(where), "interface_v1": 1}
    with backend(pool, told, is_mla_model=make is mla) as made:
        wait_until("the agent is there", lambda: made.batch_set_v1(PAGES[:1], at(0)) == [True])
        assert made.batch_set_v1(PAGES[:4], at(0, 1, 2, 3)) == [True] * 4
        assert made.batch_exists(PAGES[:6]) == 4
        assert made.batch_exists([PAGES[9], *PAGES[:4]]) == 0
        got = made.batch_get_v1([PAGES[3], PAGES[7], PAGES[1], PAGES[0]], at(10, 11, 12, 13))
        assert got == [True, False, True, True]
        for number, place in ((3, 10), (1, 12), (0, 13)):
            assert torch.equal(page(pool, place), before[number])
        told_of = made.get_stats()
        assert (told_of.prefetch_pgs, sum(told_of.backup_pgs)) == ([3], 5)
        assert made.get_stats().prefetch_pgs == []
        assert made.clear() is True
        assert made.batch_exists(PAGES[:4]) == 0


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_the_interface_of_before_takes_whole_pages_in_tensors(kept: Store, layout: str) -> None:
    pool = mha(layout)
    fill(pool)
    with backend(pool, kept.in_process()) as made:
        data = [page(pool, number) for number in range(3)]
        wait_until("the agent is there", lambda: made.set(PAGES[0], data[0]))
        assert made.batch_set(PAGES[:3], data)
        rooms = [pool.get_dummy_flat_data_page() for _ in range(4)]
        found = made.batch_get([*PAGES[:3], PAGES[9]], rooms)
        assert found[3] is None
        assert all(torch.equal(one, two) for one, two in zip(found, data, strict=False))
        assert torch.equal(made.get(PAGES[1]), data[1])
        assert torch.equal(made.get(PAGES[1], rooms[3]), data[1])
        assert made.exists(PAGES[2])
        assert not made.exists(PAGES[5])
        assert made.set(PAGES[6]) is False


def test_ranks_keep_their_own_and_mla_is_kept_once(kept: Store) -> None:
    told = {**kept.at_daemon(), "interface_v1": 1}
    for make, shared in ((mha, False), (mla, True)):
        pools = [make("page_first") for _ in range(2)]
        fill(pools[0], 1)
        with contextlib.ExitStack() as ranks:
            of = [
                ranks.enter_context(
                    backend(pool, told, tp_rank=rank, tp_size=2, is_mla_model=make is mla)
                )
                for rank, pool in enumerate(pools)
            ]
            assert of[0].batch_set_v1(PAGES[:1], at(0)) == [True]
            assert of[1].batch_exists(PAGES[:1]) == shared
            assert of[1].batch_get_v1(PAGES[:1], at(5)) == [shared]
            assert torch.equal(page(pools[1], 5), page(pools[0], 0)) is shared


def test_orgs_layouts_dtypes_and_models_do_not_meet(kept: Store) -> None:
    told = {**kept.at_daemon(), "interface_v1": 1}
    pool = mha("page_first")
    with backend(pool, told) as made:
        assert made.batch_set_v1(PAGES[:1], at(0)) == [True]
    for other, more, of in (
        (pool, kept.at_daemon("globex"), {}),
        (mha("page_first_direct"), told, {}),
        (mha("page_first", torch.float16), told, {}),
        (pool, told, {"model_name": "org/other"}),
        (pool, told, {"pp_rank": 1, "pp_size": 2}),
    ):
        with backend(other, {**more, "interface_v1": 1}, **of) as made:
            assert made.batch_exists(PAGES[:1]) == 0
    with backend(mha("page_first"), told) as made:
        assert made.batch_exists(PAGES[:1]) == 1


def test_pools_beside_the_first_one_have_pages_of_their_own(kept: Store) -> None:
    pool, side = mha("page_first"), mla("page_first")
    fill(pool, 1)
    fill(side, 2)
    with backend(pool, {**kept.at_daemon(), "interface_v1": 1}) as made:
        made.register_mem_host_pool_v2(side, PoolName.SWA)

        def transfer(keys: list[str], pages: list[int]) -> PoolTransfer:
            return PoolTransfer(PoolName.SWA, host_indices=at(*pages), keys=keys)

        made.batch_set_v1(PAGES[:5], at(0, 1, 2, 3, 4))
        assert made.batch_set_v2([transfer(PAGES[2:4], [7, 8])]) == {PoolName.SWA: [True, True]}
        assert made.batch_set_v2([transfer(PAGES[2:4], [7])]) == {PoolName.SWA: [False, False]}
        trailing = PoolTransfer(PoolName.SWA, keys=PAGES[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = made.batch_exists_v2(PAGES[:6], [trailing])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
        assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.SWA: 4}
        everywhere = PoolTransfer(PoolName.SWA, keys=PAGES[:2])
        assert made.batch_exists_v2(PAGES[:6], [everywhere]).kv_hit_pages == 0
        blocks = PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert made.batch_exists_v2(PAGES[:6], [blocks]).kv_hit_pages == 5
        assert made.batch_exists_v2(PAGES[6:8]).kv_hit_pages == 0
        assert made.batch_get_v2([transfer([PAGES[3]], [12])]) == {PoolName.SWA: [True]}
        assert torch.equal(page(side, 12), page(side, 8))


def test_pages_that_do_not_fit_stop_the_start_with_the_size_that_would(tmp_path: Path) -> None:
    with store(tmp_path, VALUE_BYTES // 2 - 64) as small:
        with (
            pytest.raises(Misconfigured, match=f"{VALUE_BYTES // 128} bytes per token or more"),
            backend(mha("page_first"), {**small.in_process(), "interface_v1": 1}),
        ):
            raise AssertionError("it began")
        with pytest.raises(Misconfigured, match="none of these"), backend(mha("page_first"), {}):
            raise AssertionError("it began")


def test_a_daemon_that_goes_away_is_a_miss(kept: Store) -> None:
    pool = mha("page_first")
    with backend(pool, {**kept.at_daemon(), "interface_v1": 1}) as made:
        assert made.batch_set_v1(PAGES[:1], at(0)) == [True]
        assert kept.daemon is not None
        kept.daemon.process.kill()
        kept.daemon.process.wait()
        kept.daemon.http.close()
        kept.daemon = None
        assert made.batch_exists(PAGES[:1]) == 0
        assert made.batch_get_v1(PAGES[:1], at(1)) == [False]
        assert made.batch_set_v1(PAGES[:1], at(0)) == [False]
        assert made.clear() is False
