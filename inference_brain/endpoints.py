"""Where the replicas of workloads are: the orchestrator's leader writes it to Redis, brains read it.

A desired document says which replicas there are and what is secret of them; where they are changes with
each instance that takes over. So a replica whose `endpoint` is `redis` has its address and state from
here. While Redis is away, or has nothing of a model since its leader is, the brain goes on with what it
knows, which grows old. A replica of which nobody has said where it is gets no request; those that want
it wait in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, structs
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from inference_brain.desired import REPLICAS_MAX, Desired, ReplicaSpec, ServedModel
from kvss_agent.documents import whole
from telemetry.decoder import Limits, Malformed, decode
from telemetry.outages import Outage
from telemetry.records import ENDPOINTS, ENDPOINTS_CHANNEL
from telemetry.redis_clients import async_client
from telemetry.units import counted

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 3.0
RETRY_SECONDS: Final = 1.0
PERIOD_SECONDS: Final = 5.0  # between two readings where nobody says that something has changed
KEYS_AT_ONCE: Final = 100
LIMITS: Final = Limits(4 << 20)
ADDRESS: Final = r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"
ADDRESS_MAX: Final = 500
Address = Annotated[str, Meta(pattern=whole(ADDRESS), max_length=ADDRESS_MAX)]


class Endpoint(msgspec.Struct, frozen=True):
    """Of one replica. `draining`: it gets no new requests."""

    replica: Annotated[str, Meta(max_length=63)]
    url: Address
    state: Literal["ready", "draining"]
    since: float = 0.0


class EndpointDocument(msgspec.Struct, frozen=True):
    """Of one model. `version` grows with each change."""

    at: float
    version: int
    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=REPLICAS_MAX)] = ()


def read(raw: bytes) -> EndpointDocument:
    """Raises Malformed."""
    return decode(raw, EndpointDocument, LIMITS)


class Endpoints:
    """What this brain knows. Used from one event loop; `ages` from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, Mapping[str, Endpoint]] = {}
        self._read_at: dict[str, float] = {}
        self.models: frozenset[str] = frozenset()  # whose endpoints are wanted

    def follow(self, told: Desired) -> None:
        """Forget models that are not served any more."""
        self.models = frozenset(model.name for model in told.models if _is_found(model))
        for name in self._told.keys() - self.models:
            del self._told[name]
            self._read_at.pop(name, None)

    def set(self, model: str, document: EndpointDocument) -> bool:
        """What Redis has of a model. Returns whether anything has changed."""
        if model not in self.models:
            return False
        found = {one.replica: one for one in document.endpoints}
        before = self._told.get(model)
        self._told[model] = found
        self._read_at[model] = self._clock()
        return before != found

    def resolved(self, told: Desired) -> Desired:
        """The document, with the addresses and states that are known now."""
        if not self.models:
            return told
        return structs.replace(told, models=tuple(self._model(model) for model in told.models))

    def ages(self, now: float) -> dict[str, float]:
        """Seconds since Redis last had something of it, by model."""
        return {model: max(0.0, now - at) for model, at in list(self._read_at.items())}

    def _model(self, model: ServedModel) -> ServedModel:
        if model.name not in self.models:
            return model
        known = self._told.get(model.name, {})
        return structs.replace(
            model, replicas=tuple(self._replica(one, known.get(one.name)) for one in model.replicas)
        )

    @staticmethod
    def _replica(spec: ReplicaSpec, known: Endpoint | None) -> ReplicaSpec:
        if spec.endpoint != "redis":
            return spec
        if known is None:
            return structs.replace(spec, url="")
        return structs.replace(spec, url=known.url, draining=spec.draining or known.state == "draining")


def _is_found(model: ServedModel) -> bool:
    return any(one.endpoint == "redis" for one in model.replicas)


class EndpointReader:
    """Reads endpoints from Redis, while `run` runs: when the leader says that they have changed, and
    every few seconds besides."""

    def __init__(self, endpoints: Endpoints, redis_url: str, changed: Callable[[], None]) -> None:
        """Raises ValueError for an address that can't be used."""
        self.is_connected: bool | None = None  # nobody knows yet
        self._outage = Outage(log, "Redis is away, and endpoints stay what they are")
        self._endpoints = endpoints
        self._changed = changed
        self._complaints: dict[str, str] = {}  # about documents, by model
        self._redis = async_client(redis_url, answer_seconds=ANSWER_SECONDS)

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                try:
                    await self._follow()
                except (RedisError, OSError) as error:
                    self.is_connected = False
                    self._outage.goes_on(error, asyncio.get_running_loop().time())
                except Exception:  # without endpoints no request of a workload is answered
                    log.exception("Endpoints can't be read; retrying soon")
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            await self._redis.aclose()

    async def _follow(self) -> None:
        """Listen first, then read: so that no change is missed."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as listening:
            await listening.subscribe(ENDPOINTS_CHANNEL)
            models: frozenset[str] = frozenset()
            while True:
                await self._read()
                self._note_connected()
                models = self._endpoints.models
                await self._news(listening, models)
                if (this := asyncio.current_task()) and this.cancelling():
                    raise asyncio.CancelledError  # which the client has swallowed

    async def _news(self, listening: PubSub, models: frozenset[str]) -> None:
        """Wait until something may have changed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PERIOD_SECONDS
        while (left := until - loop.time()) > 0 and self._endpoints.models == models:
            message = await listening.get_message(timeout=min(left, 1.0))
            if message is not None and _named(message) in models:
                return

    async def _read(self) -> None:
        has_changed = False
        names = sorted(self._endpoints.models)
        for start in range(0, len(names), KEYS_AT_ONCE):
            some = names[start : start + KEYS_AT_ONCE]
            found = await self._redis.mget([ENDPOINTS + name for name in some])
            for name, raw in zip(some, found, strict=True):
                if not isinstance(raw, bytes):
                    continue  # nobody has led for long: what is known is better
                try:
                    has_changed |= self._endpoints.set(name, read(raw))
                except Malformed as error:
                    self._complain(name, str(error))
                else:
                    self._complaints.pop(name, None)
        if has_changed:
            self._changed()

    def _complain(self, model: str, why: str) -> None:
        """Once, as long as it is the same: it is read again and again."""
        if self._complaints.get(model) != why:
            self._complaints[model] = why
            log.warning("The endpoints of %s can't be read, and stay what they are: %s", model, why)

    def _note_connected(self) -> None:
        self._outage.ends()
        if not self.is_connected:
            log.info("Reading the endpoints of %s", counted(len(self._endpoints.models), "model"))
        self.is_connected = True


def _named(message: Mapping[str, object]) -> str:
    """The model that a message is about."""
    data = message.get("data")
    return data.decode(errors="replace") if isinstance(data, bytes) else ""
