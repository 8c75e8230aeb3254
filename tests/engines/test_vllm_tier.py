"""vLLM's own tiering manager with our tier behind it; what a GPU would do is done by hand."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.objects_config import Misconfigured
from swdriver_shim.policy import Rules
from tests.engines import importing
from tests.engines.store import Store, store
from tests.live import wait_until

with importing.quiet():
    from vllm.v1.kv_offload.base import (
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),  # the engine's own
]

CHUNK_BYTES = 8192
CHUNKS = 6  # of the CPU tier in front
CLAIMS_KEY = b"a key that the gateway and the engine share!"
DRIVER = "job7"


def config(told: dict[str, Any], chunks: int, model: str, layout: str) -> OffloadingConfig:
    tier = {
        "type": "KvssTier",
        "module_path": "swdriver_shim.adapters.vllm_tier",
        "wait_seconds": 5,
        "variant": "r1",
    }
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": chunks * CHUNK_BYTES,
            "secondary_tiers": [{**tier, **told}],
        },
        engine_id=f"test-{id(told)}",
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        kv_cache_layout=layout,
    )


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(hashlib.sha256(b"block %d" % number).digest(), group)


def content(one: bytes) -> bytes:
    return hashlib.shake_128(one).digest(CHUNK_BYTES)


class Engine:
    """The scheduler's side: a manager, and requests that ask it."""

    def __init__(self, told: dict[str, Any], chunks: int, model: str, layout: str) -> None:
        self.manager: Any = TieringOffloadingSpec(config(told, chunks, model, layout)).get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.rows = self.manager.primary_tier.get_kv_memoryview()
        self._requests = 0

    def request(self, claim: str | None = None) -> Any:
        self._requests += 1
        params = None if claim is None else {"tidegate": claim}
        context = ReqContext(f"request-{self._requests}", params)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        def is_settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        wait_until("all transfers are over", is_settled)

    def offload(self, keys: Sequence[Any], claim: str | None = None) -> None:
        """What the GPU has computed goes to the CPU tier, and from there to ours."""
        context = self.request(claim)
        made = self.manager.prepare_store(keys, context)
        assert made is not None
        for one, row in zip(made.keys_to_store, made.store_spec.chunk_ids, strict=True):
            self.rows[int(row) : int(row) + 1].cast("B")[:] = content(one)
        self.manager.complete_store(made.keys_to_store, context)
        self.settle()
        self.manager.on_request_finished(context)

    def fetch(self, keys: Sequence[Any], claim: str | None = None) -> list[bool]:
        """Which of these can be loaded to the GPU in the end; every byte of them is checked."""
        context = self.request(claim)
        found = []
        for one in keys:
            verdict = LookupResult.RETRY
            while verdict in (LookupResult.RETRY, LookupResult.HIT_PENDING):
                verdict = self.manager.lookup(one, context)
                self.step()
            found.append(verdict is LookupResult.HIT)
            if verdict is LookupResult.HIT:
                spec = self.manager.prepare_load([one], context)
                row = int(spec.chunk_ids[0])
                assert bytes(self.rows[row : row + 1].cast("B")) == content(one), "wrong bytes"
                self.manager.complete_load([one], context)
        self.manager.on_request_finished(context)
        self.settle()
        return found

    def forget(self) -> None:
        """Make the CPU tier forget all that it has."""
        self.settle()
        assert self.manager.reset_cache() is not False
        self.settle()


@contextlib.contextmanager
def serving(
    told: dict[str, Any], chunks: int = CHUNKS, model: str = "org/llama", layout: str = "NHD"
) -> Iterator[Engine]:
    engine = Engine(told, chunks, model, layout)
    try:
        yield engine
    finally:
        engine.manager.shutdown()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Store]:
    with store(tmp_path, CHUNK_BYTES) as made:
        yield made


@pytest.fixture
def claims(kept: Store, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "claims.key"
    path.write_bytes(CLAIMS_KEY)
    return {**kept.in_process(), "claims_key_file": str(path), "driver": DRIVER}


KEYS = [key(number) for number in range(20)]


@pytest.mark.parametrize("where", ["process", "daemon"])
def test_what_the_cpu_tier_has_forgotten_comes_back(kept: Store, where: str) -> None:
    with serving(kept.told(where)) as engine:
        asked = engine.tier._opened.objects
        wait_until("the agent is there", lambda: asked.put([b"x"], [memoryview(b"y")]) == [True])
        for at in range(0, 18, 3):
            engine.offload(KEYS[at : at + 3])
        assert engine.fetch(KEYS[:5]) == [True] * 5
        assert engine.fetch([KEYS[19], key(1, group=1), KEYS[17]]) == [False, False, True]
        engine.forget()
        assert engine.fetch(KEYS[10:14]) == [True] * 4


def test_another_engine_finds_what_one_has_left_and_another_model_does_not(kept: Store) -> None:
    told = kept.at_daemon()
    with serving(told) as engine:
        engine.offload(KEYS[:3])
    with serving({**told}) as engine:
        assert engine.fetch(KEYS[:4]) == [True, True, True, False]
    with serving({**told}, model="org/other") as engine:
        assert engine.fetch(KEYS[:1]) == [False]
    with serving(kept.at_daemon("globex")) as engine:
        assert engine.fetch(KEYS[:3]) == [False] * 3


def test_engines_whose_bytes_differ_share_nothing(
    kept: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's names of files are equal for all of these."""
    monkeypatch.setattr("swdriver_shim.adapters.objects_config.process_began", time.time_ns)
    tuned, told = tmp_path / "llama", kept.at_daemon()
    tuned.mkdir()
    engines: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"layout": "HND"}),
        ({"variant": "r2"}, {}),
        ({"variant": ""}, {"model": str(tuned)}),
        ({"variant": ""}, {"model": str(tuned)}),
    ]
    for number, (more, of) in enumerate(engines):
        (tuned / "model.safetensors").write_bytes(bytes([number]) * 100)
        os.utime(tuned / "model.safetensors", ns=(0, 0))
        with serving({**told, **more}, **of) as engine:
            assert engine.fetch(KEYS[:1]) == [False], number
            engine.offload(KEYS[:1])
        with serving({**told, **more}, **of) as engine:
            assert engine.fetch(KEYS[:1]) == [True], number


def test_a_claim_says_whose_a_request_is(claims: dict[str, Any]) -> None:
    acme, globex = (mint(CLAIMS_KEY, DRIVER, org) for org in ("acme", "globex"))
    with serving(claims) as engine:
        asked = engine.tier._opened.objects
        wait_until("the agent is there", lambda: asked.put([b"x"], [memoryview(b"y")]) == [True])
        engine.offload(KEYS[:2], acme)
        engine.offload(KEYS[2:4], None)
        engine.offload(KEYS[4:5], mint(CLAIMS_KEY, DRIVER, "acme", Rules(no_store=True)))
        for stranger in (
            globex,
            None,
            "no token",
            mint(CLAIMS_KEY, "another driver", "acme"),
            mint(b"!" * 32, DRIVER, "acme"),
            mint(CLAIMS_KEY, DRIVER, "nobody"),
        ):
            engine.forget()
            assert engine.fetch(KEYS[:5], stranger) == [False] * 5
        engine.forget()
        assert engine.fetch(KEYS[:5], acme) == [True, True, False, False, False]


@pytest.mark.parametrize("params", ["no object", ["tidegate"], 7, {"tidegate": {"a": "b"}}])
def test_whatever_a_client_writes_is_nobody_and_raises_nothing(
    claims: dict[str, Any], params: Any
) -> None:
    """By `vllm_xargs` anything may stand in place of `kv_transfer_params`."""
    with serving(claims) as engine:
        context = ReqContext("request", params)
        engine.manager.on_new_request(context)
        assert engine.tier.lookup(KEYS[0], context) is LookupResult.MISS
        engine.manager.on_request_finished(context)


def test_a_chunk_that_is_gone_when_it_is_loaded_is_a_miss_and_is_not_asked_for_again(
    kept: Store,
) -> None:
    with serving(kept.at_daemon()) as engine:
        engine.offload(KEYS[:3])
        engine.forget()
        context = engine.request()
        while engine.manager.lookup(KEYS[0], context) is LookupResult.RETRY and not (
            engine.manager._pending_load_submissions
        ):
            engine.step()  # until it is found, and about to be loaded
        assert engine.tier._opened.objects.remove(engine.tier._names(KEYS[:1]))
        verdict = LookupResult.RETRY
        while verdict in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            engine.step()
            verdict = engine.manager.lookup(KEYS[0], context)
        assert verdict is LookupResult.MISS
        engine.manager.on_request_finished(context)
        assert engine.fetch(KEYS[:3]) == [False, True, True]


def test_a_daemon_that_is_away_is_a_miss(kept: Store) -> None:
    with serving(kept.at_daemon()) as engine:
        engine.offload(KEYS[:1])
        engine.forget()
        assert kept.daemon is not None
        kept.daemon.stop()
        kept.daemon = None
        assert engine.fetch(KEYS[:1]) == [False]
        engine.offload(KEYS[1:2])
        assert engine.fetch(KEYS[1:2]) == [True], "from the CPU tier"


def test_what_is_configured_wrong_stops_the_start(kept: Store, claims: dict[str, Any]) -> None:
    (Path(claims["claims_key_file"]).parent / "short").write_bytes(b"short")
    for wrong, because in (
        ({}, "none of these"),
        ({**kept.at_daemon(), "variant": ""}, "Configure `variant`"),
        ({**claims, "driver": ""}, "also configure `driver`"),
        ({**claims, "claims_key_file": "/nowhere"}, "can't be used"),
        ({**claims, "claims_key_file": claims["claims_key_file"][:-10] + "short"}, "can't be used"),
        ({**kept.at_daemon(), "claims_key_file": "x", "driver": DRIVER}, "belongs to one org"),
    ):
        with pytest.raises(Misconfigured, match=because), serving(wrong):
            raise AssertionError("it began")
