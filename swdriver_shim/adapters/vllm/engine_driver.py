"""The driver in an engine's scheduler process, made from what its workers report."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kvss_agent.documents import Invalid
from kvss_agent.process import daemon
from kvss_agent.process.settings import warn_of_plain
from swdriver_shim.adapters.claims import Claim, ClaimVerifier, carried_by
from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.joining import JoinedDriver, RemoteShards
from swdriver_shim.adapters.vllm.blocks import Unsupported
from swdriver_shim.adapters.vllm.config import EngineConfig, GovernedConfig
from swdriver_shim.adapters.vllm.events import UnitEvents
from swdriver_shim.adapters.vllm.lora import AdapterNames
from swdriver_shim.adapters.vllm.orders import SaveResult
from swdriver_shim.adapters.vllm.scheduling import (
    BlockPins,
    ConnectorScheduler,
    GroupShape,
    Requester,
)
from swdriver_shim.daemon import metrics
from swdriver_shim.daemon.host import HostThread
from swdriver_shim.daemon.service import Service
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.data_plane.grants import grant, shard_name
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.worker.client import RemoteShard, WorkerConnection
from swdriver_shim.data_plane.worker.protocol import WorkerAddress, read
from swdriver_shim.decider.decider import Decider
from swdriver_shim.decider.removals import Receipt
from swdriver_shim.desired import Desired, GroupSpec, HomeSpec, ModelSpec, OrgSpec
from swdriver_shim.keys import Media
from swdriver_shim.layout import part_name
from telemetry.emit.reporter import Reporter
from telemetry.units import counted

log = logging.getLogger(__name__)

_SAVED: Final = msgspec.msgpack.Decoder(SaveResult)

LOOK_SECONDS: Final = 0.005  # between looks at whether loads and saves have ended
RESET_SECONDS: Final = 10.0  # the engine stands still meanwhile
TOKENS_PER_STATE: Final = 1024  # for so many tokens of prompts memory has one state


@dataclass(frozen=True)
class GroupFacts:
    """A cache group of one worker."""

    name: str
    block_tokens: int
    window: int | None
    bytes_per_token: int
    unit_tokens: int
    bytes_per_state: int = 0  # of a state group, which has no bytes per token

    def shape(self) -> GroupShape:
        return GroupShape(self.block_tokens, self.window, is_state=self.bytes_per_state > 0)


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker reports: the address of its `WorkerServer`, and the layout of its KV."""

    address: WorkerAddress
    groups: Sequence[GroupFacts]
    layout: str
    dtype: str


def model_spec(weights: NameSpec, workers: Sequence[WorkerFacts]) -> ModelSpec:
    """The model as these workers have it, one shard each. Raises Unsupported."""
    first = workers[0]
    for worker in workers[1:]:
        if [(one.name, one.block_tokens) for one in worker.groups] != [
            (one.name, one.block_tokens) for one in first.groups
        ]:
            raise Unsupported("The cache groups of the workers differ in their kinds or block sizes.")
    layouts = ",".join(dict.fromkeys(worker.layout for worker in workers))
    return ModelSpec(
        name=weights.name,
        revision=weights.revision,
        kv_dtype=first.dtype,
        layout=f"{len(workers)}x{layouts}",
        unit_tokens=first.groups[0].unit_tokens,
        groups=tuple(
            _group_spec([worker.groups[at] for worker in workers]) for at in range(len(first.groups))
        ),
    )


def _group_spec(shards: Sequence[GroupFacts]) -> GroupSpec:
    """A group as all workers have it."""
    first = shards[0]
    if first.bytes_per_state:
        return GroupSpec(
            name=first.name,
            bytes_per_state=tuple(shard.bytes_per_state for shard in shards),
            tokens_per_state=max(TOKENS_PER_STATE, first.unit_tokens),
        )
    return GroupSpec(
        name=first.name,
        bytes_per_token=tuple(shard.bytes_per_token for shard in shards),
        window=first.window,
    )


def _events(model: ModelSpec, hash_tokens: int) -> UnitEvents | None:
    """None for a model that keeps nothing but states: no unit of it has all of its columns."""
    kv = (at for at, group in enumerate(model.groups) if group.bytes_per_token)
    first = next(kv, None)
    return None if first is None else UnitEvents(model.unit_tokens, hash_tokens, first)


def media_of(request: Any) -> list[Media]:
    """The images, sounds and other inputs of a vLLM request, by its hashes of them."""
    return [
        Media(
            one.mm_position.offset,
            one.mm_position.offset + one.mm_position.length,
            one.identifier.encode(errors="surrogatepass"),  # a client may have chosen it
        )
        for one in request.mm_features
    ]


class EngineDriver:
    """Decides for an engine. Raises Unsupported, Invalid, NotGranted, OSError or Unusable, each with a
    sentence."""

    def __init__(
        self,
        config: EngineConfig | GovernedConfig,
        workers: Sequence[WorkerFacts],
        hash_tokens: int | None = None,
        *,
        weights: NameSpec | None = None,
        engine: str = "vllm",
        pins: BlockPins | None = None,
        has_media_hashes: bool = True,
    ) -> None:
        """`hash_tokens`: the tokens of one of vLLM's hashes; None if KV events are not wanted.
        `weights`: what the engine has loaded, if the configuration does not name it. `engine`: its name
        and version. `pins`: see `ConnectorScheduler`. `has_media_hashes`: whether vLLM names images and
        sounds by what is in them, and does not only number them."""
        self.refused: Counter[str] = Counter()  # requests that are cached for nobody, by reason
        self._config = config
        self._has_media_hashes = has_media_hashes
        self._adapters = AdapterNames(are_fixed=config.fixed_adapters)
        self._document: Desired | None = None
        self._orgs: dict[str, OrgSpec] = {}  # of what was told
        self._used: Decider | None = None
        self._is_leaving = False
        if (name := config.model or weights) is None:
            raise Invalid("Nobody says which weights these are: set `model`, their name and revision.")
        model = model_spec(name, workers)
        homes = _granted(config, model) if isinstance(config, EngineConfig) else ()
        self.events = _events(model, hash_tokens) if hash_tokens else None
        self.scheduling = ConnectorScheduler(
            [group.shape() for group in workers[0].groups],
            model.unit_tokens,
            len(workers),
            self.who,
            self.is_served,
            wait_seconds=config.wait_seconds,
            only_if_faster=config.only_if_faster,
            events=self.events,
            pins=pins,
        )
        with contextlib.ExitStack() as opened:  # a start that fails leaves nothing open
            lines = []
            for worker in workers:
                lines.append(WorkerConnection(worker.address, self._receive))
                opened.callback(lines[-1].close)
            self._process: Standalone | Governed  # configured by a file or by a console
            if isinstance(config, EngineConfig):
                self._process = Standalone(config, model, homes, lines)
            else:
                self._process = Governed(config, model, engine, lines, self._leave)
            self._opened = opened.pop_all()
        log.info("The driver has started; model: %s", msgspec.json.encode(model).decode())
        if not self._use(self.shim) and self._process.is_attached:
            log.warning(
                "Nothing is cached yet: this engine has no desired document. It follows one as soon as "
                "the console sends it: start a job in a session there, with driver %s.",
                self.shim.name,
            )

    def close(self) -> None:
        self.scheduling.close()
        self._process.close()
        self._opened.close()

    @property
    def shim(self) -> Shim:
        """Another one once the driver's identity was given away, or taken. Another thread does that, at
        any moment: who needs more than one answer takes it once. One that is stopped meanwhile still has
        its document, and its driver misses."""
        return self._process.shim

    def _leave(self, seconds: float) -> bool:
        """Nothing is loaded or stored from here on. Wait for what is under way, which the engine's steps
        and the workers end. Called by another thread than vLLM's scheduler."""
        self._is_leaving = True
        until = time.monotonic() + seconds
        while not (is_quiet := self.scheduling.is_quiet()) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        return is_quiet

    def _use(self, shim: Shim) -> bool:
        """Begin to cache as soon as there is a document, and follow its homes. Returns whether there is
        one. Called for each request, in vLLM's scheduler: it waits for nobody."""
        told, driver = shim.desired, shim.driver_or_none
        if told is None or driver is None:
            return False
        if driver is not self._used:
            if not self.scheduling.is_quiet():
                return False  # of another driver, which had to be stopped in the middle
            self.scheduling.let_go_all()
            self._is_leaving = False
        elif self._is_leaving:
            return False
        self.scheduling.use(driver, is_far=shim.shards.is_far)
        if driver is self._used:
            return True
        self._used = driver
        if self.events:
            driver.ledger.add_listener(self.events)
        for name, why in shim.shards.why_lost().items():
            log.warning("Shard %s is not open: %s", name, why)
        log.info("Prefixes are stored for %s", counted(len(told.orgs), "org"))
        return True

    def _receive(self, raw: msgspec.Raw) -> None:
        self.scheduling.saved(read(raw, _SAVED))

    # Requests

    def who(self, request: Any) -> Requester | None:
        """Whom a vLLM request is cached for. None if it is not cached, and the reason is counted."""
        if request.prompt_embeds is not None or request.pooling_params:
            self.refused["prompt_embeddings" if request.prompt_embeds is not None else "pooling"] += 1
            return None
        if request.resumable:
            self.refused["streamed_input"] += 1  # its tokens may change
            return None
        if request.mm_features and not self._has_media_hashes:
            self.refused["media_without_hash"] += 1
            return None
        shim = self.shim
        claims = self._process.claims() if self._use(shim) else None
        if claims is None:
            # The console has not sent one yet; or another engine has the driver's identity.
            self.refused["no_document" if self._process.is_attached else "not_attached"] += 1
            return None
        claim = claims.verify(carried_by(request.kv_transfer_params))
        unsigned = self._config.unsigned_org
        if not isinstance(claim, Claim):
            self.refused[claim.value] += 1
            if unsigned is None:
                return None
            claim = Claim(unsigned)
        elif claim.org == unsigned:
            self.refused["not_claimable"] += 1
            return None
        org = self._org(shim, claim.org)
        if org is None:
            self.refused["unknown_org"] += 1
            return None
        lora = request.lora_request
        adapter = self._adapters.name(lora) if lora else ""
        if adapter is None:
            self.refused["adapter_changed"] += 1
            return None
        return Requester(shim.keys(org, adapter), claim.rules, media_of(request), claim.sibling)

    def is_served(self, asker: Requester) -> bool:
        """Whether the org still exists and has the same secret, and the driver is the same."""
        shim = self.shim
        if self._is_leaving or shim.driver_or_none is not self._used:
            return False
        org, keys = self._org(shim, asker.keys.org), asker.keys
        return org is not None and shim.keys(org, keys.namespace.adapter).tag == keys.tag

    def _org(self, shim: Shim, name: str) -> OrgSpec | None:
        if (told := shim.desired) is not self._document:
            self._document, self._orgs = told, {one.name: one for one in told.orgs} if told else {}
        return self._orgs.get(name)

    # Reset

    def reset(self) -> bool:
        """Purge everything of every org from all tiers. Returns whether nothing is left."""
        shim = self.shim
        told, driver = shim.desired, shim.driver_or_none
        if told is None or driver is None:
            return True
        self.scheduling.let_go_all()
        until = time.monotonic() + RESET_SECONDS
        receipts = {
            org.name: driver.removals.purge(
                org.name,
                tag=org.tag,
                seconds=max(0.0, until - time.monotonic()),
            )
            for org in told.orgs
        }
        log.info("The cache was reset: %s", {org: _short(one) for org, one in receipts.items()})
        return all(one.done for one in receipts.values())


class Standalone:
    """A driver that a file configures. It asks no console anything."""

    is_attached = True

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSpec,
        homes: tuple[HomeSpec, ...],
        lines: Sequence[WorkerConnection],
    ) -> None:
        notes = Path(config.state_dir) if config.state_dir else None
        self._claims = ClaimVerifier(config.claims_key, config.driver)
        self.shim = Shim(
            config.driver,
            None,
            daemon.software(),
            remote_shard=_remote_shards(lines, notes),
            notes=notes,
        )
        with contextlib.ExitStack() as started:
            started.callback(self.shim.stop)
            self.shim.set_desired(msgspec.json.encode(config.desired(model, homes)))
            if config.api:
                api = Service(self.shim, config.api.token).application()
                place = config.api.host, config.api.port
                warn_of_plain(place)
                listener = daemon.listen(place)
                server = partial(daemon.http_server, api, listener, self.shim.http)
                started.callback(HostThread(server).close)
            reporter = Reporter(
                config.telemetry,
                None,
                "driver",
                daemon.software(),
                name=config.driver,
                collect=partial(metrics.collect, self.shim),
                limits=self.shim.limits,
                slowest=self.shim.take_slowest,
            )
            started.callback(reporter.stop)  # while shards can still be asked
            self._started = started.pop_all()

    def claims(self) -> ClaimVerifier:
        return self._claims

    def close(self) -> None:
        self._started.close()


class Governed(JoinedDriver):
    """A driver that a console configures."""

    def __init__(
        self,
        config: GovernedConfig,
        model: ModelSpec,
        engine: str,
        lines: Sequence[WorkerConnection],
        leave: Callable[[float], bool],
    ) -> None:
        """`leave`: see `JoinedDriver.leave`."""
        self._leave = leave
        super().__init__(config, model, engine, lambda notes: _remote_shards(lines, notes))

    def leave(self, seconds: float) -> bool:
        return self._leave(seconds)


def _remote_shards(lines: Sequence[WorkerConnection], notes: Path | None) -> RemoteShards:
    def made(group: str, index: int, home: Home, path: PathSpec | None) -> RemoteShard:
        return RemoteShard(f"{group}.{index}", lines[index], home, notes, path)

    return made


def _granted(config: EngineConfig, model: ModelSpec) -> tuple[HomeSpec, ...]:
    """The homes of the file, or of shards that its agent has been told to make."""
    if (agent := config.agent) is None:
        return config.homes
    shape = model.shape()
    slots = shape.slots_for(agent.memory_bytes)
    if not all(slots):
        raise Invalid(f"`memory_bytes` is {agent.memory_bytes}: less than one column needs.")
    namespace = model.namespace().digest().hex()
    control = AgentControl(agent.url, agent.token)
    grant(control, shape, config.driver, config.secret, slots, namespace, agent.tier2)
    return tuple(
        HomeSpec(
            group=group.name,
            index=index,
            address=agent.address,
            shard=shard_name(config.driver, part_name(group.name, index)),
        )
        for group in shape.groups
        for index in range(group.shards)
    )


def _short(receipt: Receipt) -> str:
    return (
        f"{receipt.columns} columns ({receipt.bytes} bytes) and {receipt.tier2_files} files "
        f"({receipt.tier2_bytes} bytes){'' if receipt.done else ', not finished'}"
    )
