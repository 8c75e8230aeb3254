"""The driver in an engine's scheduler process, made from what its workers report."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kvss_agent.client import Address
from kvss_agent.http.api import Invalid
from kvss_agent.process import daemon
from swdriver_shim.adapters.claims import Claim, ClaimVerifier, carried_by
from swdriver_shim.adapters.vllm.blocks import Unsupported
from swdriver_shim.adapters.vllm.config import AgentSpec, ApiSpec, EngineConfig
from swdriver_shim.adapters.vllm.events import UnitEvents
from swdriver_shim.adapters.vllm.orders import SaveResult
from swdriver_shim.adapters.vllm.scheduling import ConnectorScheduler, GroupShape, Requester
from swdriver_shim.daemon import metrics
from swdriver_shim.daemon.service import Service
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.data_plane.grants import grant, part_name, shard_name
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.worker.client import RemoteShard, WorkerConnection
from swdriver_shim.data_plane.worker.protocol import WorkerAddress, read
from swdriver_shim.decider.removals import Receipt
from swdriver_shim.desired import Desired, GroupSpec, HomeSpec, ModelSpec, OrgSpec
from swdriver_shim.keys import isolation_tag
from telemetry.emit.reporter import Reporter

log = logging.getLogger(__name__)

_SAVED: Final = msgspec.msgpack.Decoder(SaveResult)

RESET_SECONDS: Final = 10.0  # the engine stands still meanwhile


@dataclass(frozen=True)
class GroupFacts:
    """A cache group of one worker."""

    name: str
    block_tokens: int
    window: int | None
    bytes_per_token: int
    unit_tokens: int

    def shape(self) -> GroupShape:
        return GroupShape(self.block_tokens, self.window)


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker reports: the address of its `WorkerServer`, and the layout of its KV."""

    address: WorkerAddress
    groups: Sequence[GroupFacts]
    layout: str
    dtype: str


def model_spec(setting: EngineConfig, workers: Sequence[WorkerFacts]) -> ModelSpec:
    """The model as these workers have it, one shard each. Raises Unsupported."""
    first = workers[0]
    for worker in workers[1:]:
        if [(one.name, one.block_tokens) for one in worker.groups] != [
            (one.name, one.block_tokens) for one in first.groups
        ]:
            raise Unsupported("The cache groups of the workers differ in their kinds or block sizes.")
    layouts = ",".join(dict.fromkeys(worker.layout for worker in workers))
    return ModelSpec(
        name=setting.model.name,
        revision=setting.model.revision,
        kv_dtype=first.dtype,
        layout=f"{len(workers)}x{layouts}",
        unit_tokens=first.groups[0].unit_tokens,
        groups=tuple(
            GroupSpec(
                name=group.name,
                bytes_per_token=tuple(worker.groups[at].bytes_per_token for worker in workers),
                window=group.window,
            )
            for at, group in enumerate(first.groups)
        ),
    )


class EngineDriver:
    """Decides for an engine. Raises Unsupported, Invalid or NotGranted, each with a sentence."""

    def __init__(
        self, setting: EngineConfig, workers: Sequence[WorkerFacts], hash_tokens: int | None = None
    ) -> None:
        """`hash_tokens`: the tokens of one of vLLM's hashes; None if KV events are not wanted."""
        self.refused: Counter[str] = Counter()  # requests that are cached for nobody, by reason
        self._setting = setting
        self._document: Desired | None = None
        self._orgs: dict[str, OrgSpec] = {}  # of what was told
        self._verifier = ClaimVerifier(setting.claims_key, setting.driver)
        model = model_spec(setting, workers)
        homes = self._granted(setting.agent, model) if setting.agent else setting.homes
        self._lines = [WorkerConnection(worker.address, self._receive) for worker in workers]

        notes = Path(setting.state_dir) if setting.state_dir else None

        def remote_shard(group: str, index: int, home: Home, path: PathSpec | None) -> RemoteShard:
            return RemoteShard(f"{group}.{index}", self._lines[index], home, notes, path)

        self.shim = Shim(setting.driver, None, daemon.software(), remote_shard=remote_shard, notes=notes)
        told = setting.desired(model, homes)
        self.shim.set_desired(msgspec.json.encode(told))
        self.events = UnitEvents(model.unit_tokens, hash_tokens) if hash_tokens else None
        if self.events:
            self.shim.driver.ledger.set_listener(self.events)
        self.scheduling = ConnectorScheduler(
            self.shim.driver,
            [group.shape() for group in workers[0].groups],
            model.unit_tokens,
            len(workers),
            self.who,
            self.is_served,
            wait_seconds=setting.wait_seconds,
            only_if_faster=setting.only_if_faster,
            events=self.events,
            is_far=any(not Address.parse(home.address).path for home in homes),
        )
        self._api = Api(self.shim, setting.api) if setting.api else None
        self._reporter = Reporter(
            setting.telemetry,
            None,
            "driver",
            daemon.software(),
            name=setting.driver,
            collect=partial(metrics.collect, self.shim),
            limits=self.shim.limits,
            slowest=self.shim.take_slowest,
        )
        for shard in self.shim.observed()["shards"]:
            if shard["state"] != "here":
                log.warning("Shard %s is not open: %s", shard["shard"], shard["reason"])
        log.info(
            "Prefixes are stored for %d orgs; model: %s", len(told.orgs), msgspec.json.encode(model)
        )

    def close(self) -> None:
        if self._api:
            self._api.close()
        self._reporter.stop()  # while shards can still be asked
        self.scheduling.close()
        self.shim.stop()
        for line in self._lines:
            line.close()

    def _granted(self, agent: AgentSpec, model: ModelSpec) -> tuple[HomeSpec, ...]:
        setting, shape = self._setting, model.shape()
        slots = shape.slots_for(agent.memory_bytes)
        if not slots:
            raise Invalid(f"`memory_bytes` is {agent.memory_bytes}: less than one column needs.")
        namespace = model.namespace().digest().hex()
        control = AgentControl(agent.url, agent.token)
        grant(control, shape, setting.driver, setting.secret, slots, namespace, agent.tier2)
        return tuple(
            HomeSpec(
                group=group.name,
                index=index,
                address=agent.address,
                shard=shard_name(setting.driver, part_name(group.name, index)),
            )
            for group in shape.groups
            for index in range(len(group.bytes_per_token))
        )

    def _receive(self, raw: msgspec.Raw) -> None:
        self.scheduling.saved(read(raw, _SAVED))

    # Requests

    def who(self, request: Any) -> Requester | None:
        """Whom a vLLM request is cached for. None if it is not cached, and the reason is counted."""
        if request.mm_features or request.prompt_embeds is not None or request.pooling_params:
            self.refused["not_only_tokens"] += 1  # its KV depends on more than its tokens
            return None
        if request.resumable:
            self.refused["streamed_input"] += 1  # its tokens may change
            return None
        claim = self._verifier.verify(carried_by(request.kv_transfer_params))
        unsigned = self._setting.unsigned_org
        if not isinstance(claim, Claim):
            self.refused[claim.value] += 1
            if unsigned is None:
                return None
            claim = Claim(unsigned)
        elif claim.org == unsigned:
            self.refused["not_claimable"] += 1
            return None
        org = self._org(claim.org)
        if org is None:
            self.refused["unknown_org"] += 1
            return None
        lora = request.lora_request
        adapter = f"{lora.lora_name} {lora.lora_path}" if lora else ""
        return Requester(self.shim.keys(org, adapter), claim.rules)

    def is_served(self, asker: Requester) -> bool:
        """Whether the org still exists and has the same secret."""
        org, keys = self._org(asker.keys.org), asker.keys
        return org is not None and self.shim.keys(org, keys.namespace.adapter).tag == keys.tag

    def _org(self, name: str) -> OrgSpec | None:
        if (told := self.shim.desired) is not self._document:
            self._document, self._orgs = told, {one.name: one for one in told.orgs} if told else {}
        return self._orgs.get(name)

    # Reset

    def reset(self) -> bool:
        """Purge everything of every org from all tiers. Returns whether nothing is left."""
        told, driver = self.shim.desired, self.shim.driver
        if told is None:
            return True
        self.scheduling.let_go_all()
        until = time.monotonic() + RESET_SECONDS
        receipts = {
            org.name: driver.removals.purge(
                org.name,
                tag=isolation_tag(org.name, org.secret),
                seconds=max(0.0, until - time.monotonic()),
            )
            for org in told.orgs
        }
        log.info("The cache was reset: %s", {org: _short(one) for org, one in receipts.items()})
        return all(one.done for one in receipts.values())


def _short(receipt: Receipt) -> str:
    return (
        f"{receipt.columns} columns ({receipt.bytes} bytes) and {receipt.tier2_files} files "
        f"({receipt.tier2_bytes} bytes){'' if receipt.done else ', not finished'}"
    )


class Api:
    """The driver's HTTP API, in a thread of the engine's process."""

    def __init__(self, shim: Shim, spec: ApiSpec) -> None:
        """Raises OSError for a port that is taken."""
        self._listener = daemon.listen((spec.host, spec.port))
        self._application = Service(shim, spec.token).application()
        self._policy = shim.http
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with daemon.http_server(self._application, self._listener, self._policy):
            await self._stop.wait()
