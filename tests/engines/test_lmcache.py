"""LMCache's own clients: `lm://` at our front, and the connector that asks a driver itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvss_agent.process import daemon as daemons
from swdriver_shim.adapters.objects_config import Misconfigured
from tests.engines import importing
from tests.engines.store import Store, store
from tests.live import wait_until

with importing.quiet():
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector import CreateConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),  # the engine's own
]

LAYERS, TOKENS, HEADS, WIDTH = 3, 32, 2, 16
DTYPE = torch.bfloat16
CHUNK_BYTES = LAYERS * 2 * TOKENS * HEADS * WIDTH * 2
METADATA = LMCacheMetadata(
    model_name="org/llama",
    world_size=1,
    local_world_size=1,
    worker_id=0,
    local_worker_id=0,
    kv_dtype=DTYPE,
    kv_shape=(LAYERS, 2, TOKENS, HEADS, WIDTH),
    chunk_size=TOKENS,
)


class Engine:
    """What of LMCache is around a connector: its loop in a thread, and its memory."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        url: str,
        metadata: LMCacheMetadata = METADATA,
        **told: Any,
    ) -> None:
        self.loop = loop
        plugins = ["kvss"] if url.startswith("plugin") else []
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS, max_local_cpu_size=0.05, remote_storage_plugins=plugins, extra_config=told
        )
        self.memory = LocalCPUBackend(self.config, metadata, "cpu")
        self.connector = CreateConnector(url, loop, self.memory, self.config, metadata, "kvss")

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def chunk(self, seed: int, tokens: int = TOKENS) -> Any:
        shape = torch.Size([2, LAYERS, tokens, HEADS * WIDTH])
        made = self.memory.allocate(shape, DTYPE, MemoryFormat.KV_2LTD)
        generator = torch.Generator().manual_seed(seed)
        made.tensor.copy_(torch.randn(shape, generator=generator).to(DTYPE))
        return made

    def put(self, key: Any, seed: int, tokens: int = TOKENS) -> None:
        self.run(self.connector.put(key, self.chunk(seed, tokens)))

    def is_there(self, key: Any, seed: int, tokens: int = TOKENS) -> bool:
        """Whether it comes back; then as it was, shape and dtype and all."""
        got = self.run(self.connector.get(key))
        if got is not None:
            self.check(got, seed, tokens)
        return got is not None

    def check(self, got: Any, seed: int, tokens: int = TOKENS) -> None:
        wanted = self.chunk(seed, tokens)
        assert got.get_dtype() is DTYPE
        assert got.get_shape() == wanted.get_shape()
        assert got.get_memory_format() == wanted.get_memory_format()
        assert torch.equal(got.tensor, wanted.tensor)
        for one in (got, wanted):
            one.ref_count_down()


def key(number: int, **tags: str) -> Any:
    configs = {f"lmcache.tag.{name}": value for name, value in tags.items()}
    return CacheEngineKey("org/llama", 1, 0, 0xABC0 + number, DTYPE, configs)


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes engines."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made: list[Engine] = []

    def engine(url: str, **told: Any) -> Engine:
        made.append(Engine(loop, url, **told))
        return made[-1]

    try:
        yield engine
    finally:
        for one in made:
            one.run(one.connector.close())
            one.memory.memory_allocator.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Store]:
    with store(tmp_path, CHUNK_BYTES + 64) as made:
        yield made


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(daemons.listen(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def plugin(told: dict[str, Any], **more: Any) -> dict[str, Any]:
    prefix = "remote_storage_plugin.kvss."
    told = {
        "module_path": "swdriver_shim.adapters.lmcache",
        "class_name": "KvssConnector",
        "wait_seconds": 5,
        "variant": "r1",
        **told,
    }
    return {**{prefix + name: value for name, value in told.items()}, **more}


def test_the_client_of_lmcache_finds_at_our_front_what_it_has_put(kept: Store, make: Make) -> None:
    ours, theirs = free_ports(2)
    kept.at_daemon("acme", "--lmcache", f"acme=127.0.0.1:{ours},globex=127.0.0.1:{theirs}")
    acme, globex = make(f"lm://127.0.0.1:{ours}"), make(f"lm://127.0.0.1:{theirs}")
    for number, tokens in enumerate([TOKENS, 5, 1]):
        assert not acme.is_there(key(number), number)
        assert not acme.run(acme.connector.exists(key(number)))
        acme.put(key(number), number, tokens)
        assert acme.is_there(key(number), number, tokens)
        assert acme.connector.exists_sync(key(number))
    assert not globex.is_there(key(0), 0)
    acme.put(key(0, user="one"), 7)
    assert acme.is_there(key(0, user="one"), 7)
    assert not acme.is_there(key(0, user="two"), 7)
    assert acme.is_there(key(0), 0)
    assert acme.run(acme.connector.batched_async_contains("id", [key(0), key(1), key(9)])) == 2
    assert kept.daemon is not None
    text = kept.daemon.http.get("/metrics", headers={"authorization": "Bearer " + "c" * 40}).text
    assert 'swdriver_lmcache_total{org="acme",what="puts"} 4' in text


def test_engines_whose_bytes_differ_share_nothing(
    kept: Store, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's keys are equal for all of these."""
    monkeypatch.setattr("swdriver_shim.adapters.objects_config.process_began", time.time_ns)
    local = replace(METADATA, model_name=str(tmp_path / "llama"))
    (tmp_path / "llama").mkdir()
    told, found = kept.at_daemon(), []
    for variant, metadata, weights in (
        ("r1", METADATA, b""),
        ("r2", METADATA, b""),
        ("", local, b"one"),
        ("", local, b"two"),
    ):
        (tmp_path / "llama" / "model.safetensors").write_bytes(weights)
        os.utime(tmp_path / "llama" / "model.safetensors", ns=(0, 0))
        for _ in range(2):
            engine = make("plugin://kvss", metadata=metadata, **plugin({**told, "variant": variant}))
            found.append(engine.is_there(key(0), 0))
            engine.put(key(0), 0)
    assert found == [False, True] * 4


def test_what_the_keys_do_not_tell_has_to_be_configured(kept: Store, make: Make, tmp_path: Path) -> None:
    """Which revision of a repository it is, and which of the 8-bit types."""
    told = plugin({**kept.at_daemon(), "variant": ""})
    in_bytes = replace(METADATA, model_name=str(tmp_path), kv_dtype=torch.uint8)
    for metadata in (METADATA, in_bytes):
        with pytest.raises(Misconfigured, match="Configure `variant`"):
            make("plugin://kvss", metadata=metadata, **told)


@pytest.mark.parametrize("where", ["process", "daemon"])
@pytest.mark.parametrize("with_meta", [True, False])
def test_the_connector_finds_what_it_has_put(
    kept: Store,
    make: Make,
    where: str,
    with_meta: bool,  # noqa: FBT001
) -> None:
    told = plugin(kept.told(where), save_chunk_meta=with_meta)
    engine = make("plugin://kvss", **told)
    connector = engine.connector

    def works() -> bool:
        engine.put(key(99), 99)
        return engine.is_there(key(99), 99)

    wait_until("the agent is there", works)
    engine.put(key(0), 0)
    engine.put(key(1), 1, 7)
    assert engine.is_there(key(0), 0)
    assert engine.is_there(key(1), 1, 7)
    assert not engine.is_there(key(2), 2)
    chunks = [engine.chunk(number) for number in (3, 4)]
    engine.run(connector.batched_put([key(3), key(4)], chunks))
    keys = [key(0), key(3), key(8), key(4)]
    assert connector.batched_contains(keys) == 2
    assert engine.run(connector.batched_async_contains("id", keys)) == 2
    found = engine.run(connector.batched_get(keys))
    assert found[2] is None
    for got, seed in zip((found[0], found[1], found[3]), (0, 3, 4), strict=True):
        engine.check(got, seed)
    count_leading = engine.run(connector.batched_get_non_blocking("id", keys))
    assert len(count_leading) == 2
    for got, seed in zip(count_leading, (0, 3), strict=True):
        engine.check(got, seed)
    assert connector.remove_sync(key(3))
    assert not connector.exists_sync(key(3))
    assert engine.run(connector.list()) == []


def test_the_connector_of_an_org_has_nothing_of_another(kept: Store, make: Make) -> None:
    acme = make("plugin://kvss", **plugin(kept.at_daemon("acme")))
    globex = make("plugin://kvss", **plugin(kept.at_daemon("globex")))
    acme.put(key(0), 0)
    assert acme.is_there(key(0), 0)
    assert not globex.is_there(key(0), 0)


def test_chunks_that_do_not_fit_stop_the_start(tmp_path: Path, make: Make) -> None:
    with store(tmp_path, CHUNK_BYTES) as small, pytest.raises(ValueError, match="bytes_per_token"):
        make("plugin://kvss", **plugin(small.in_process()))


def free_chunks(engine: Engine) -> int:
    """So many there is memory for."""
    shape, held = torch.Size([2, LAYERS, TOKENS, HEADS * WIDTH]), list[Any]()
    while (one := engine.memory.allocate(shape, DTYPE, busy_loop=False)) is not None:
        held.append(one)
    for one in held:
        one.ref_count_down()
    return len(held)


@pytest.mark.parametrize("with_meta", [True, False])
def test_a_get_that_fails_leaks_nothing(
    kept: Store,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    with_meta: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr("swdriver_shim.adapters.lmcache.COPIED_BYTES", CHUNK_BYTES)
    engine = make("plugin://kvss", **plugin(kept.at_daemon(), save_chunk_meta=with_meta))
    for number in range(3):
        engine.put(key(number), number)
    before = free_chunks(engine)
    objects = engine.connector.getWrappedConnector()._objects
    get, calls = objects.get, list[int]()

    def failing(keys: Any, into: Any, seconds: float) -> Any:
        calls.append(sum(map(len, into)))
        if len(calls) > 1 or not with_meta:
            raise RuntimeError("it is closed")
        return get(keys, into, seconds)

    objects.get = failing
    with pytest.raises(RuntimeError, match="closed"):
        engine.run(engine.connector.batched_get([key(0), key(1), key(2)]))
    objects.get = get
    assert free_chunks(engine) == before


def test_copies_take_so_much_memory_at_once_and_no_more(
    kept: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swdriver_shim.adapters.lmcache.COPIED_BYTES", 2 * (CHUNK_BYTES + 64))
    engine = make("plugin://kvss", **plugin(kept.at_daemon(), save_chunk_meta=True))
    objects, moved = engine.connector.getWrappedConnector()._objects, list[int]()
    get, put = objects.get, objects.put

    def getting(keys: Any, into: Any, seconds: float) -> Any:
        moved.append(sum(map(len, into)))
        return get(keys, into, seconds)

    def putting(keys: Any, values: Any) -> Any:
        moved.append(sum(map(len, values)))
        return put(keys, values)

    objects.get, objects.put = getting, putting
    keys = [key(number) for number in range(5)]
    engine.run(engine.connector.batched_put(keys, [engine.chunk(number) for number in range(5)]))
    for seed, got in enumerate(engine.run(engine.connector.batched_get(keys))):
        engine.check(got, seed)
    assert len(moved) == 6
    assert max(moved) <= 2 * (CHUNK_BYTES + 64)


def test_without_memory_for_it_a_chunk_is_a_miss_and_nothing_leaks(kept: Store, make: Make) -> None:
    for with_meta in (True, False):
        engine = make("plugin://kvss", **plugin(kept.at_daemon(), save_chunk_meta=with_meta))
        engine.put(key(0), 0)
        free = engine.memory.memory_allocator.memcheck()
        assert free
        held = []
        while (
            one := engine.memory.allocate(
                torch.Size([2, LAYERS, TOKENS, HEADS * WIDTH]), DTYPE, busy_loop=False
            )
        ) is not None:
            held.append(one)
        assert not engine.is_there(key(0), 0)
        for one in held:
            one.ref_count_down()
        assert engine.is_there(key(0), 0)
