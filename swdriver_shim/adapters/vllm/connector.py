"""The connector that vLLM loads, with its two roles. What they do is in the other modules.

Written against 0.32 and 0.33, whose interfaces differ in nothing that is used here.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvss_agent import native
from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.model_config import deciding, depend_on_length
from swdriver_shim.adapters.process_end import end_with_parent, notice_stops
from swdriver_shim.adapters.vllm.blocks import BlockGroup, Blocks, Layer, Unsupported, unit_tokens
from swdriver_shim.adapters.vllm.config import config_of
from swdriver_shim.adapters.vllm.device import DeviceBlocks, DeviceLayer, rows_of
from swdriver_shim.adapters.vllm.engine_driver import EngineDriver, GroupFacts, WorkerFacts
from swdriver_shim.adapters.vllm.orders import Step, WorkerReport
from swdriver_shim.adapters.vllm.scheduling import goes_on_from_blocks
from swdriver_shim.adapters.vllm.stats import MEANING, Counts, StatsSource, added
from swdriver_shim.adapters.vllm.worker import Result, Worker
from swdriver_shim.adapters.weights import process_began, weights_of
from swdriver_shim.data_plane.worker.server import WorkerServer
from swdriver_shim.keys import COLUMN_TOKENS

log = logging.getLogger(__name__)

OUR_LOGGERS: Final = ("swdriver_shim", "kvss_agent", "telemetry")
FORMAT: Final = "vllm.1"  # of what is in a column
FULL: Final = (FullAttentionSpec, MLAAttentionSpec)
SHORT: Final = 0.1  # of all blocks: if fewer are free, saves don't hold any for long
ALIGN: Final = "align"  # vLLM keeps states at the ends of blocks, and offers them to connectors


@dataclass
class Metadata(KVConnectorMetadata):
    step: Step


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        self.report.add(other.report)
        return self


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    facts: WorkerFacts


class Stats(KVConnectorStats):
    """What was counted since the last time, see `numbers`."""

    data: Counts

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"{kind} {of}": n for of, counts in self.data.items() for kind, n in counts.items()}

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:tidegate_tokens` and the like, by kind."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {
            of: self._counter_cls(f"vllm:tidegate_{of}", meaning, labelnames=[*self._labelnames, "kind"])
            for of, meaning in MEANING.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for of, counts in transfer_stats_data.items():
            for kind, count in counts.items():
                self._counters[of].labels(*labels, kind).inc(count)


class PoolPins:
    """vLLM's pool of blocks: a pin is one request more that has a block."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, blocks: Collection[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Collection[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def is_short(self) -> bool:
        return bool(self._pool.get_num_free_blocks() < self._pool.num_gpu_blocks * SHORT)


class TidegateConnector(KVConnectorBase_V1, SupportsHMA):
    """One for the scheduler, which decides, and one for each worker, which moves bytes."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        parallel = vllm_config.parallel_config
        if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
            raise Unsupported("With context parallelism, a block's tokens are spread over workers.")
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise Unsupported(
                'Say "kv_load_failure_policy": "recompute" beside "kv_connector": by vLLM\'s default a '
                "column that does not come fails its request."
            )
        specs = [_of_one(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        self._has_states = any(isinstance(spec, MambaSpec) for spec in specs)
        if self._has_states and vllm_config.speculative_config:
            raise Unsupported(
                "The model has layers that keep a state (Mamba, linear attention). Speculation moves "
                "states between blocks, which was not tried with Tidegate's connector: run the model "
                "without --speculative-config."
            )
        if self._has_states and role is KVConnectorRole.SCHEDULER:
            _warn_of_rare_states([spec.block_size for spec in specs])
        self._worker: Worker | None = None
        self._result = Result()
        self._half: WorkerServer | None = None
        self._deciding: EngineDriver | None = None
        self._cache: Any = None  # vLLM's own, once it is there
        if role is KVConnectorRole.SCHEDULER:
            told = self._kv_transfer_config.get_from_extra_config("tidegate", None)
            self._config = config_of(told, parallel.data_parallel_index, parallel.data_parallel_size)
            notice_stops()
        end_with_parent(self.shutdown)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not come to pass is a miss, no more."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """Layers wait for their loads."""
        return True

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Blocks are where they were at the start."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        staged = bool(self._kv_transfer_config.get_from_extra_config("staged", False))
        groups, facts = _groups(self._kv_cache_config, kv_caches, staged=staged)
        native.build_in_background()  # this process moves the bytes
        self._half = WorkerServer()
        self._worker = Worker(
            [group.name for group in facts],
            groups,
            self._half,
            goes_on_from_blocks=goes_on_from_blocks([one.shape() for one in facts]),
        )
        self._facts = WorkerFacts(self._half.address, facts, self._layout(groups), _dtype(kv_caches))

    def _layout(self, groups: Sequence[BlockGroup]) -> str:
        """All that decides how bytes lie in blocks, and which they are for given weights, as far as
        anybody can know it."""
        config = self._vllm_config
        layers = config.compilation_config.static_forward_context
        states = [
            (spec.shapes, spec.dtypes, spec.mamba_type)
            for group in self._kv_cache_config.kv_cache_groups
            for spec in _of_all(group.kv_cache_spec)
            if isinstance(spec, MambaSpec)
        ]
        shape = repr(
            (
                vllm.__version__,
                self._kv_cache_config.kv_cache_layout,
                config.cache_config.cache_dtype,  # tensors of all 8-bit types are of one
                config.parallel_config.tensor_parallel_size,
                [(group.shape, group.layers[0].name) for group in groups],
                [_kernel(layers[of.name]) for group in groups for of in group.layers],
                self._computed_with(),
                *([states] if states else []),
            )
        )
        return f"{FORMAT}:{hashlib.sha256(shape.encode()).hexdigest()[:32]}"

    def _computed_with(self) -> str:
        loaded = self._vllm_config.model_config
        told = loaded.hf_config.to_dict()  # with what was overridden
        longest = loaded.max_model_len if depend_on_length(told) else None
        facts = (deciding(told), loaded.quantization, str(loaded.dtype), longest)
        return json.dumps(facts, sort_keys=True)

    def get_handshake_metadata(self) -> Handshake:
        return Handshake(self._facts)

    @property
    def _at_work(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("vLLM registers its KV caches before the first step")
        return self._worker

    def handle_preemptions(self, kv_connector_metadata: Metadata) -> None:
        self._at_work.begin(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._at_work.load(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._at_work.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves begin when all layers are there: a column is sealed as one."""

    def wait_for_save(self) -> None:
        """Begin to save what the step has computed. Does not wait."""
        self._at_work.computed(self._step)

    @property
    def _step(self) -> Step:
        metadata: Metadata = self._get_connector_metadata()
        return metadata.step

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002 - we are told of those that matter
    ) -> KVConnectorTransferResults:
        self._result = self._at_work.take_result()
        return KVConnectorTransferResults(
            finished_sending=self._result.ended,
            finished_recving=self._result.arrived,
            failed_recving=self._result.not_arrived,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._result.bad_blocks

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        report = self._result.report
        return WorkerMetadata(report) if report.loads else None

    # Scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._cache = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Handshake]) -> None:
        """All workers are there: the driver begins."""
        workers = [metadata[rank].facts for rank in sorted(metadata)]
        self._deciding = EngineDriver(
            self._config,
            workers,
            self._hash_tokens(workers[0]),
            weights=None if self._config.model else self._weights(),
            engine=f"vllm {vllm.__version__}",
            pins=self._pins(),
            has_media_hashes=_has_media_hashes(self._vllm_config),
        )
        self._numbers = StatsSource(self._deciding)

    def _weights(self) -> NameSpec:
        """vLLM makes this connector when its workers, which are younger, have loaded them."""
        loaded = self._vllm_config.model_config
        commit = getattr(loaded.hf_config, "_commit_hash", None)
        return weights_of(loaded.model, loaded.revision, commit, loaded_after=process_began())

    def _pins(self) -> PoolPins | None:
        """Only where vLLM writes to new blocks before it tells the connector of the step: it fills them
        with zeros for states and where types differ, and copies states into them."""
        if self._cache and self._kv_cache_config.needs_kv_cache_zeroing:
            return PoolPins(self._cache.block_pool)
        return None

    def _hash_tokens(self, worker: WorkerFacts) -> int | None:
        """So many have one hash in vLLM's KV events; None if those are not wanted."""
        wanted = self._vllm_config.kv_events_config
        if wanted is None or not wanted.enable_kv_cache_events:
            return None
        return self._kv_cache_config.hash_block_size or worker.groups[0].block_tokens

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self._driver.events
        if events is None:
            return
        for news in events.take():
            hashes = [maybe_convert_block_hash(one) for one in news.hashes]
            if not news.is_there:
                yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU)
                continue
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=maybe_convert_block_hash(news.parent) if news.parent else None,
                token_ids=[],  # which are kept by nobody
                block_size=events.hash_tokens,
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=None,
            )

    @property
    def _driver(self) -> EngineDriver:
        if self._deciding is None:
            raise RuntimeError("vLLM tells of its workers before the first request")
        return self._deciding

    def on_new_request(self, request: Any) -> None:
        self._driver.scheduling.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._driver.scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids()
        self._driver.scheduling.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        given = [(one.block_ids, one.num_computed_tokens) for one in scheduler_output.scheduled_new_reqs]
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            given.append((blocks or (), computed if name in cached.resumed_req_ids else 0))
        tables = scheduler_output.kv_connector_block_state
        step = self._driver.scheduling.step(
            scheduler_output.num_scheduled_tokens,
            tables.get_block_ids,
            given,
            tables.boundary_state_offloads if self._has_states else None,
        )
        return Metadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        meta: WorkerMetadata | None = connector_output.kv_connector_worker_meta
        if meta:
            self._driver.scheduling.heard(meta.report)
            # vLLM has them computed anew, but not for a request that was given up in the same step.
            if (unfilled := self._driver.scheduling.take_unfilled()) and self._cache:
                self._cache.evict_blocks(unfilled)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._driver.scheduling.finished(request, block_ids), None

    def get_kv_connector_stats(self) -> Stats | None:
        """Asked of the scheduler's role once for each step, when it is over."""
        if self._deciding is None:
            return None
        self._deciding.scheduling.stepped()
        counts = self._numbers.since()
        return Stats(data=counts) if counts else None

    def reset_cache(self) -> bool:
        return self._driver.reset()

    def shutdown(self) -> None:
        """Once, whoever calls it first; see `end_with_parent`."""
        deciding, self._deciding = self._deciding, None
        worker, self._worker = self._worker, None
        if deciding:
            deciding.close()
        if worker:
            worker.close()


def _has_media_hashes(config: VllmConfig) -> bool:
    """vLLM only numbers images and sounds where neither of its own caches asks what is in them."""
    about = config.model_config.multimodal_config
    has_cache = about is None or about.mm_processor_cache_gb > 0
    return has_cache or bool(config.cache_config.enable_prefix_caching)


def _warn_of_rare_states(block_tokens: Sequence[int]) -> None:
    """vLLM has states where blocks end. Those that end within a column are not stored."""
    unit, least = unit_tokens(block_tokens), math.lcm(*block_tokens)
    if unit > least:
        log.warning(
            "States are stored every %d tokens at most, where blocks of %d and columns of %d tokens end "
            "together, so hits are short and few. Set --block-size to a multiple of %d.",
            unit,
            least,
            COLUMN_TOKENS,
            COLUMN_TOKENS,
        )


def _log_as_vllm() -> None:
    """What we log appears where vLLM's own lines do, at its level; by itself it shows only its own."""
    theirs = logging.getLogger("vllm")
    for name in OUR_LOGGERS:
        ours = logging.getLogger(name)
        if theirs.handlers and not ours.handlers:
            ours.handlers, ours.propagate = list(theirs.handlers), False
            ours.setLevel(theirs.level)


def _groups(
    cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor], *, staged: bool
) -> tuple[list[BlockGroup], list[GroupFacts]]:
    """How this worker's KV lies in memory. `staged`: as if that were a device's. Raises Unsupported."""
    specs = [_of_one(group.kv_cache_spec) for group in cache.kv_cache_groups]
    unit = unit_tokens([spec.block_size for spec in specs])
    made: list[BlockGroup] = []
    facts: list[GroupFacts] = []
    for group, spec in zip(cache.kv_cache_groups, specs, strict=True):
        layers = [
            (name, rows)
            for name in group.layer_names
            for rows in rows_of(name, kv_caches[name], cache.num_blocks)
        ]
        is_state = isinstance(spec, MambaSpec)
        blocks = _bank(layers, spec.block_size, unit, staged=staged, is_state=is_state)
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        name = "state" if is_state else "full" if window is None else f"window{window}"
        taken = [one.name for one in facts]
        if name in taken:
            name = f"{name}-{len(taken)}"
        shape = blocks.shape
        made.append(blocks)
        facts.append(
            GroupFacts(name, spec.block_size, window, shape.bytes_per_token, unit, shape.bytes_per_state)
        )
    return made, facts


def _of_all(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """What each layer of a group keeps."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _of_one(spec: KVCacheSpec) -> KVCacheSpec:
    """What all layers of a group have in common. Raises Unsupported for what has no columns."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        for one in _of_all(spec):
            _of_one(one)
        return spec.first_spec
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != ALIGN:
            raise Unsupported(
                "The model has layers that keep a state (Mamba, linear attention). vLLM offers states "
                f"to connectors only with --mamba-cache-mode {ALIGN} and --enable-prefix-caching; here "
                f"the mode is {spec.mamba_cache_mode}. Set both, or run it without this connector."
            )
        return spec
    if type(spec) not in (*FULL, SlidingWindowSpec):
        raise Unsupported(
            f"The model has layers whose cache is a {type(spec).__name__}, which has no columns of "
            "tokens that could be kept. Run it without Tidegate's connector."
        )
    return spec


def _bank(
    layers: Sequence[tuple[str, torch.Tensor]],
    block_tokens: int,
    unit: int,
    *,
    staged: bool,
    is_state: bool,
) -> BlockGroup:
    """The rows of a group's layers, wherever they are. Raises Unsupported."""
    devices = {rows.device for _, rows in layers}
    if len(devices) > 1:
        raise Unsupported(f"The layers of one group are on several devices: {devices}.")
    if staged or devices.pop().type != "cpu":
        on_device = [DeviceLayer(*layer) for layer in layers]
        return DeviceBlocks(on_device, block_tokens, unit, is_state=is_state)
    return Blocks([_in_memory(*layer) for layer in layers], block_tokens, unit, is_state=is_state)


def _in_memory(name: str, rows: torch.Tensor) -> Layer:
    count, size = rows.shape
    stride = rows.stride(0)
    reach = (count - 1) * stride + size
    memory = memoryview((ctypes.c_ubyte * reach).from_address(rows.data_ptr())).cast("B")
    return Layer(name, memory, 0, stride, size)


def _kernel(layer: Any) -> tuple[str, str]:
    """What writes a layer's blocks; on CPUs each set of instructions packs them in its own way."""
    return layer.get_attn_backend().get_name(), getattr(layer, "isa", "")


def _dtype(kv_caches: dict[str, torch.Tensor]) -> str:
    return ",".join(sorted({str(one.dtype).removeprefix("torch.") for one in kv_caches.values()}))
