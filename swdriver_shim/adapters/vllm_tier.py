"""A driver behind vLLM's own CPU tier: a secondary tier for `TieringOffloadingSpec`.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KvssTier",
          "state_dir": "/etc/tidegate/engine", "org": "acme", "variant": "r1"}]}}'

All requests are served as the configured org. With `claims_key_file` and `driver` they are served as the
org that a signed claim in `kv_transfer_params` names (`claims`), and requests without one are not
cached. vLLM's CPU tier does not distinguish orgs: a gateway that serves several has to give each its own
`cache_salt`.

`variant` stands for what vLLM does not tell a tier, such as the revision of a repository: engines with
different ones share nothing. Made for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from swdriver_shim.adapters.claims import Claim, ClaimVerifier, carried_by
from swdriver_shim.adapters.objects_config import Misconfigured, of_weights, open_objects
from swdriver_shim.adapters.remote import Objects
from swdriver_shim.adapters.threads import start_pool
from swdriver_shim.adapters.weights import DIGITS
from swdriver_shim.policy import AS_USUAL, Rules
from telemetry.units import counted

log = logging.getLogger(__name__)

LOADS_AT_ONCE, STORES_AT_ONCE = 4, 2

OrgKey = tuple[str, OffloadKey]  # orgs have separate objects


@dataclass(frozen=True, slots=True)
class Requester:
    """The org that a request is cached for, and its objects."""

    org: str
    objects: Objects
    rules: Rules = AS_USUAL


@dataclass(frozen=True, slots=True)
class NotCached:
    """A request that is not cached."""


class LookUps(AsyncLookupManager):
    """Looks up many keys at once, in a thread. The scheduler asks again until they are known."""

    def __init__(self, tier: KvssTier) -> None:
        super().__init__(tier.tier_type)
        self._tier = tier

    def batch_lookup(self, keys: list[OrgKey], req_context: ReqContext) -> Iterable[bool]:
        return self._tier.are_there([key for _, key in keys], req_context)


@dataclass(frozen=True, slots=True)
class Job:
    job: TransferJob
    began: float
    done: Future[list[bool]]  # for each key


class KvssTier(SecondaryTierManager):
    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **told: Any,
    ) -> None:
        """Raises Misconfigured."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality else None
        self._verifier = _verifier(told)
        # vLLM's own names of files tell apart models by name, types, block sizes and groups, but neither
        # weights nor the order of a block's bytes.
        root = repr((self.block_size_bytes, *_form(offloading_spec, told)))
        self._opened = open_objects(told, value_bytes=self.block_size_bytes)
        self._org = str(told.get("org", ""))
        self._wait_seconds = self._opened.wait_seconds
        self._rows = primary_kv_view.cast("B")
        self._namer = FileMapper.from_offloading_spec(
            root_dir=hashlib.sha256(root.encode()).hexdigest()[:DIGITS],
            offloading_spec=offloading_spec,
            blocks_per_file=offloading_spec.blocks_per_chunk,
            parallel_agnostic=True,
        )
        self._looks = LookUps(self)
        self._loads = start_pool(LOADS_AT_ONCE, "kvss-load")
        self._stores = start_pool(STORES_AT_ONCE, "kvss-store")
        self._jobs: dict[int, Job] = {}

    # Requesters

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_context.set_state(self._who(req_context))
        return RequestOffloadingContext()

    def _asker(self, context: ReqContext) -> Requester | None:
        if not (context.get_state(Requester) or context.get_state(NotCached)):
            context.set_state(self._who(context))
        found: Requester | None = context.get_state(Requester)
        return found

    def _who(self, context: ReqContext) -> Requester | NotCached:
        if self._verifier is None:
            return Requester(self._org, self._opened.objects)
        claim = self._verifier.verify(carried_by(context.kv_transfer_params))
        objects = self._opened.of(claim.org) if isinstance(claim, Claim) else None
        if objects is None or not isinstance(claim, Claim):
            return NotCached()
        return Requester(claim.org, objects, claim.rules)

    # Lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        asker = self._asker(req_context)
        if asker is None:
            return LookupResult.MISS
        found = self._looks.lookup((asker.org, key), req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def are_there(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[bool]:
        """Called in a thread of its own."""
        asker = self._asker(context)
        if asker is None:
            return [False] * len(keys)
        return asker.objects.exists(self._names(keys), self._wait_seconds)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._looks.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._looks.cleanup(req_context.req_id)

    # Transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._stores, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, self._load, job_metadata)

    def _submit(self, threads: ThreadPoolExecutor, work: Any, job: TransferJob) -> None:
        done = threads.submit(work, self._asker(job.req_context), list(job.keys), job.chunk_ids)
        self._jobs[job.job_id] = Job(job, time.perf_counter(), done)

    def _store(
        self, asker: Requester | None, keys: Sequence[OffloadKey], rows: Sequence[int]
    ) -> list[bool]:
        if asker is None or asker.rules.no_store:
            return [True] * len(keys)  # as requested: nothing of it is stored
        return asker.objects.put(self._names(keys), self._at(rows), asker.rules)

    def _load(
        self, asker: Requester | None, keys: Sequence[OffloadKey], rows: Sequence[int]
    ) -> list[bool]:
        if asker is None:
            return [False] * len(keys)
        lengths = asker.objects.get(self._names(keys), self._at(rows), self._wait_seconds)
        return [length == self.block_size_bytes for length in lengths]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = [one for one in self._jobs.values() if one.done.done()]
        for one in finished:
            del self._jobs[one.job.job_id]
        return [self._result(one) for one in finished]

    def _result(self, one: Job) -> JobResult:
        keys = list(one.job.keys)
        if error := one.done.exception():
            log.error("A transfer of %s failed", counted(len(keys), "chunk"), exc_info=error)
        done = [False] * len(keys) if error else one.done.result()
        there = [key for key, is_done in zip(keys, done, strict=True) if is_done]
        if one.job.is_promotion and len(there) < len(keys):
            # Otherwise the scheduler would find them and try to load them again and again.
            self._missed(set(keys).difference(there), one.job.req_context)
        return JobResult(
            one.job.job_id,
            all(done),
            tuple(there) if one.job.is_promotion and not all(done) else None,
            time.perf_counter() - one.began,
            len(there) * self.block_size_bytes,
        )

    def _missed(self, keys: Collection[OffloadKey], context: ReqContext) -> None:
        if asker := self._asker(context):
            self._looks.mark_miss([(asker.org, key) for key in keys])

    def drain_jobs(self) -> None:
        wait([one.done for one in self._jobs.values()])

    def shutdown(self) -> None:
        self._looks.shutdown()
        for threads in (self._loads, self._stores):
            threads.shutdown(cancel_futures=True)
        self._opened.close()

    def _names(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        return [self._namer.get_file_name(key).encode() for key in keys]

    def _at(self, rows: Sequence[int]) -> list[memoryview]:
        size = self.block_size_bytes
        return [self._rows[int(row) * size : (int(row) + 1) * size] for row in rows]


def _form(spec: OffloadingSpec, told: dict[str, Any]) -> tuple[str, ...]:
    """What vLLM's names of files do not say, and other bytes come of. Raises Misconfigured."""
    model = spec.config.model.name
    why = f"vLLM does not tell its tiers which revision of {model} it serves"
    return (*of_weights(model, told, why), vllm.__version__, str(spec.config.kv_cache_layout))


def _verifier(told: dict[str, Any]) -> ClaimVerifier | None:
    """The verifier of claims, if claims are configured."""
    if not (path := told.get("claims_key_file")):
        return None
    if not (driver := told.get("driver")) or not told.get("state_dir"):
        raise Misconfigured(
            "With claims_key_file also configure `driver`, the audience of claims, and a driver in this "
            "process (state_dir and org): a daemon's token belongs to one org."
        )
    try:
        return ClaimVerifier(Path(str(path)).read_bytes(), str(driver))
    except (OSError, ValueError) as error:
        raise Misconfigured(f"The key for claims can't be used: {error}.") from error
