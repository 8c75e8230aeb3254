"""A brain that follows its desired document: the one place that holds its parts together.

brain = Brain("east", state_dir, software, token=token)
async with brain.running():                     # follows the document that was stored last
    brain.set_desired(parse(raw))               # the console's, or one written by hand
    await brain.api(scope, receive, send)       # OpenAI's API
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import structs

from inference_brain import desired as documents
from inference_brain import metrics
from inference_brain.admission import Shared
from inference_brain.api.app import Api, Bounds
from inference_brain.api.generate import Generator, Patience
from inference_brain.api.keys import Callers, owner_of
from inference_brain.api.starts import Starts
from inference_brain.body_room import BodyRoom
from inference_brain.cancellation import say_why_it_ended
from inference_brain.counts import Counts
from inference_brain.decisions import RequestRecord
from inference_brain.desired import Desired
from inference_brain.endpoints import EndpointReader, Endpoints
from inference_brain.journey import Records
from inference_brain.maps import CacheMaps
from inference_brain.maps.reader import MapReader, ReaderTask
from inference_brain.picker.brain_router import BrainRouter, Carrier
from inference_brain.prompts import Prompts
from inference_brain.recalls import Recalls
from inference_brain.router import Router
from inference_brain.upstream import Fleet
from inference_brain.upstream.engine_metrics import EngineMetrics, fetching, targets
from inference_brain.upstream.probes import Probes
from kvss_agent.documents import Conflict
from kvss_agent.http.api import CONTROLLER
from kvss_agent.http.client import Client, Timeouts
from kvss_agent.http.server import HttpPolicy
from kvss_agent.process.membership import MembershipStatus
from kvss_agent.security.confirmations import (
    BrainStatement,
    MapCover,
    NotConfirmedYet,
    Question,
    Scope,
)
from swdriver_shim.daemon.stored_document import PurgedTags, SealedDocument
from swdriver_shim.keys import isolation_tag
from telemetry.units import duration

log = logging.getLogger(__name__)

OWNERS_MAX: Final = 256
ANOTHER_BRAIN: Final = "It is of brain {}, and this is {}."
NO_REDIS: Final = (
    "It does not know where replicas of {} are: that is in Redis, of which it was told no address. Set "
    "TIDEGATE_OWN_TELEMETRY_URL of the console, or BRAIN_TELEMETRY"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a brain serves. `authorities`: PEM, who vouches for replicas that speak TLS."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    patience: Patience = field(default_factory=Patience)
    bounds: Bounds = field(default_factory=Bounds)
    authorities: Path | None = None
    logs_access: bool = True
    trusted_org: str = ""


class Brain:
    """Follows its desired document. Used from one event loop, but for `collection.collect` and what
    `set_desired` parses."""

    def __init__(
        self,
        name: str,
        state_dir: Path | None,
        software: str = "",
        *,
        token: str = "",
        options: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `state_dir` the document is not stored, and has to be set after each start. What is
        stored is sealed with a key that follows from `token`. Raises OSError."""
        options = options or Options()
        self.name = name
        self.software = software
        self.started_at = time.time()
        self.desired: Desired | None = None
        self.observed_generation = 0
        self.document_at = 0.0  # when the document that is followed was received, or stored
        self.membership_status = MembershipStatus()
        self.http = HttpPolicy(owners=lambda: [CONTROLLER])  # of the control API
        self.counts = Counts()
        self.records = Records()
        self.client = Client(options.timeouts, options.authorities)
        self.fleet = Fleet(clock)
        self.endpoints = Endpoints(clock)
        self.maps = CacheMaps()
        self.prompts = Prompts()
        self.router = Router(self.fleet, self.maps, self.prompts, self.counts, clock=clock, name=name)
        generator = Generator(self.client, options.patience, self._stream)
        room = BodyRoom(options.bounds.bodies_bytes_max)
        shared = options.bounds, options.patience.client, room, Starts()
        parts = (self.router, generator, self.counts, self.records, *shared)
        self.api = Api(*parts, logs_access=options.logs_access)
        self.trusted_api: Api | None = None
        if options.trusted_org:
            self.trusted_api = Api(
                *parts, logs_access=options.logs_access, trusted_org=options.trusted_org
            )
        self.engines = EngineMetrics(fetching(self.client), self.router.sent, clock=clock)
        self.router.others = self.engines.others
        self._probes = Probes(self.fleet, self.client, clock)
        self._gateway_api = Api(
            self.router,
            Carrier(self.router, self._stream, self._probes.why_gone),
            self.counts,
            self.records,
            *shared,
            logs_access=options.logs_access,
        )
        self.for_gateways = BrainRouter(
            self._gateway_api, lambda: self.is_ready, self._gateway_api.whose
        )
        self._clock = clock
        self._document = None
        if state_dir:
            self._document = SealedDocument(state_dir / "desired.json", token, documents.parse)
        self._changing = asyncio.Lock()
        self._purged_tags = PurgedTags(state_dir / "purged_tags" if state_dir else None)
        self._purged_scopes = PurgedTags(state_dir / "purged_scopes" if state_dir else None)
        self._reader: ReaderTask | None = None
        self._finding: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the document that was stored last. Raises OSError."""
        # Drivers may report what was purged before the last start. What is served again is known again.
        self.maps.forget(map(_scope, (*self._purged_tags, *self._purged_scopes)))
        stored = self._document.read() if self._document else None
        if stored is None:
            return
        if stored.document.brain != self.name:
            why = ANOTHER_BRAIN.format(stored.document.brain, self.name)
            log.warning("The stored desired document is ignored. %s", why)
            return
        log.info(
            "Following the stored desired document, generation %d, %s old",
            stored.document.generation,
            duration(max(0.0, time.time() - stored.at)),
        )
        self._follow(self._without_purged(stored.document))
        self.document_at = stored.at

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the stored document, and do what has to be done beside requests. Raises OSError."""
        self.start()
        tasks = [
            asyncio.create_task(self._probes.run(), name="probes"),
            asyncio.create_task(self.engines.run(), name="engines"),
            asyncio.create_task(self.router.admission.run(), name="admission"),
        ]
        for task in tasks:
            task.add_done_callback(say_why_it_ended)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._reader:
                self._reader.stop()
                await self._reader.ended()
            if self.router.recalls:
                await self.router.recalls.close()
            if self._finding:
                self._finding.cancel()
                await asyncio.gather(self._finding, return_exceptions=True)
            self.prompts.close()
            await self.client.close()

    def use_redis(self, url: str, reader_url: str) -> None:
        """Share limits, fairness and loads with all brains that use this Redis, and follow the cache
        maps that drivers report there, and the endpoints of workloads. `reader_url`: the same, as the
        user that may read endpoints. Raises ValueError."""
        self.router.admission.share(Shared(url))
        self._reader = ReaderTask(MapReader(self.maps, url))
        count = self.counts.add
        self.router.recalls = Recalls(
            url, partial(count, metrics.PREFETCH), partial(count, metrics.BORROWS)
        )
        reader = EndpointReader(self.endpoints, reader_url, self._endpoints_changed)
        self._finding = asyncio.create_task(reader.run(), name="endpoints")

    @property
    def is_ready(self) -> bool:
        return self.desired is not None

    def owners(self) -> list[str]:
        """The owners that have reserved places among clients' connections: orgs, if they are few enough
        to look at all of them with each connection."""
        orgs = self.desired.orgs if self.desired else ()
        return [owner_of(org) for org in orgs] if len(orgs) <= OWNERS_MAX else []

    # Documents

    async def change_desired(self, raw: bytes) -> Desired:
        """As `set_desired`, for a document as it came: what takes long is done beside the event loop.
        Raises Invalid, too."""
        async with self._changing:
            told = await asyncio.to_thread(self._parsed, raw)
            if self._is_new(told):
                await asyncio.to_thread(self._store, told)
                self._follow(self._without_purged(told))  # a purge may have come meanwhile
            self.document_at = time.time()
        return told

    def set_desired(self, told: Desired) -> Desired:
        """Store a document and follow it. Setting an equal document again changes nothing.

        Raises Conflict for an older generation, for the current one with other contents, and for another
        brain; OSError if it can't be stored."""
        told = self._without_purged(told)
        if self._is_new(told):
            self._store(told)
            self._follow(told)
        self.document_at = time.time()
        return told

    def _parsed(self, raw: bytes) -> Desired:
        return self._without_purged(documents.parse(raw))

    def _is_new(self, told: Desired) -> bool:
        """Raises Conflict."""
        if told.brain != self.name:
            raise Conflict(ANOTHER_BRAIN.format(told.brain, self.name))
        return self.desired is None or not told.repeats(self.desired)

    def _store(self, told: Desired) -> None:
        if self._document:
            self._document.write(msgspec.json.encode(told))

    def _follow(self, told: Desired) -> None:
        self.desired = told
        callers = Callers(told)
        self.endpoints.follow(told)
        self.router.follow(self.endpoints.resolved(told))
        self.api.callers = self._gateway_api.callers = callers
        self.engines.follow(targets(self.fleet))
        if self.trusted_api:
            self.trusted_api.callers = callers
        self.observed_generation = told.generation

    def _endpoints_changed(self) -> None:
        """Replicas have moved to other addresses, or are to get no new requests."""
        if self.desired is None:
            return
        before = {(one.model, one.name): one.spec.url for one in self.fleet}
        self.fleet.follow(self.endpoints.resolved(self.desired))
        for one in self.fleet:
            if before.get((one.model, one.name)) not in ("", one.spec.url):
                self.router.renew((one.model, one.name))
        self.engines.follow(targets(self.fleet))

    def _without_purged(self, told: Desired) -> Desired:
        """Without the orgs of which a tag was purged: an older document can't restore them."""
        if not self._purged_tags:
            return told
        orgs = tuple(
            org for org in told.orgs if not any(tag.hex() in self._purged_tags for tag in org.tags)
        )
        if len(orgs) == len(told.orgs):
            return told
        names = {org.name for org in orgs}
        models = tuple(
            model
            if model.orgs is None
            else structs.replace(model, orgs=tuple(one for one in model.orgs if one in names))
            for model in told.models
        )
        return structs.replace(told, orgs=orgs, models=models)

    # Purges

    def purge(self, question: Question) -> BrainStatement:
        """Forget everything of these scopes, and return a statement of it. Raises NotConfirmedYet with a
        sentence while a document still has them, and OSError. May be called again."""
        whole = [scope.tag for scope in question.scopes if scope.namespace is None]
        if whole and not question.withdrawn:
            self._ban(whole)
        if still := next(self._still_served(question.scopes), None):
            raise NotConfirmedYet(still)
        self._purged_scopes.add([_named(scope) for scope in question.scopes])
        self.router.forget([bytes.fromhex(scope.tag) for scope in question.scopes], question.org or None)
        forgotten = self.maps.forget(map(_scope, map(_named, question.scopes)))
        self.prompts.forget(question.org or None)  # what it keeps of prompts has no tags
        return BrainStatement(
            identity=f"brain:{self.name}",
            operation=question.operation,
            challenge=question.challenge,
            epoch=question.epoch,
            scopes=question.scopes,
            at=time.time(),
            org=question.org,
            maps=tuple(MapCover(driver, forgotten.get(driver, 0)) for driver in self._drivers()),
        )

    def _drivers(self) -> list[str]:
        """All drivers whose maps are followed."""
        return sorted({one.spec.driver.name for one in self.fleet if one.spec.driver})

    def _ban(self, tags: Collection[str]) -> None:
        """Never make keys with these tags again."""
        self._purged_tags.add(tags)
        if self.desired and (told := self._without_purged(self.desired)) != self.desired:
            self._store(told)
            self._follow(told)

    def _still_served(self, scopes: Collection[Scope]) -> Iterator[str]:
        told = self.desired
        if told is None:
            return
        tags = {(scope.tag, scope.namespace) for scope in scopes}
        specs = [one.driver.model for model in told.models for one in model.replicas if one.driver]
        for org in told.orgs:
            if any((tag.hex(), None) in tags for tag in org.tags):
                yield "It has not applied the document yet under which the org has another tag."
            for spec in specs:
                tag = isolation_tag(org.name, org.secret_of(spec.name)).hex()
                if (tag, spec.namespace().digest().hex()) in tags:
                    yield f"It has not applied the document yet with the org's new tag for {spec.name}."

    # Status

    def find(self, request: str) -> RequestRecord | None:
        """A request that is running, or one of the last."""
        return self.records.find(request)

    def observed(self) -> dict[str, Any]:
        """The state of the brain, beside what is desired."""
        told, now = self.desired, self._clock()
        ages = self.endpoints.ages(now)
        return {
            "generation": told.generation if told else 0,
            "observed_generation": self.observed_generation,
            "document_at": self.document_at,
            "name": self.name,
            "software": self.software,
            "started_at": self.started_at,
            "ready": self.is_ready,
            "console": self.membership_status.shown(),
            "orgs": len(told.orgs) if told else 0,
            "streams": self.counts.streams,
            "problems": list(self._problems()),
            "models": [
                {
                    "name": model.name,
                    "tokenizer": self._tokenizer_state(model.tokenizer),
                    "endpoints_age_seconds": ages.get(model.name),
                    "replicas": [
                        {
                            "name": replica.name,
                            "state": replica.state(now),
                            "reason": replica.health.unreachable,
                            "requests": replica.in_progress,
                            "map_age_seconds": self._map_age(replica.spec.driver),
                            "load_age_seconds": self.engines.age((model.name, replica.name)),
                            "load_problem": self.engines.problem((model.name, replica.name)),
                        }
                        for replica in self.fleet.of(model.name)
                    ],
                }
                for model in (told.models if told else ())
            ],
        }

    def _problems(self) -> Iterator[str]:
        """What keeps the brain from doing as its document says, for the console to show."""
        if self._finding is None and (unfound := sorted(self.endpoints.models)):
            yield NO_REDIS.format(", ".join(unfound[:5]))
        for model in self.desired.models if self.desired else ():
            if why := self.prompts.broken.get(model.tokenizer):
                yield f"Model {model.name}: {why}"

    def _tokenizer_state(self, folder: str) -> str:
        return self.prompts.state(folder) if folder else "none"

    def _map_age(self, driver: documents.DriverSpec | None) -> float | None:
        return self.maps.age(driver.name, self._clock()) if driver else None

    @property
    def reads_maps(self) -> bool | None:
        """Whether Redis answers; None where there is none."""
        return self._reader.reader.is_connected if self._reader else None

    def _stream(self, change: int) -> None:
        self.counts.streams += change


def _named(scope: Scope) -> str:
    """As it is stored."""
    return f"{scope.tag}/{scope.namespace}" if scope.namespace else scope.tag


def _scope(named: str) -> tuple[bytes, bytes | None]:
    """As cache maps have it."""
    tag, _, namespace = named.partition("/")
    return bytes.fromhex(tag), bytes.fromhex(namespace) or None
