"""The agent: its desired document, its observed state, and reconciling the two."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kvss_agent import desired as documents
from kvss_agent import native
from kvss_agent.borrowing import STALL_SECONDS, Borrowing
from kvss_agent.client.connection import Credentials, Lost
from kvss_agent.data_plane import constants
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Cause
from kvss_agent.data_plane.server import DataPlane
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.desired import Desired, Progress, ShardSpec
from kvss_agent.documents import Conflict, Invalid
from kvss_agent.follower import Follower
from kvss_agent.http.api import CONTROLLER
from kvss_agent.http.server import HttpPolicy
from kvss_agent.limits.background import Background, Totals
from kvss_agent.process.durable_file import write_durably
from kvss_agent.process.membership import MembershipStatus
from kvss_agent.pulls import Pull, Source, run_pull
from kvss_agent.purges import Purges
from kvss_agent.redundancy.stores import RedundantStores
from kvss_agent.security.trust import Trust
from kvss_agent.settings import Settings
from kvss_agent.shard.arena import Arena, NoMemory, available_bytes
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.tier2.backend import Failed
from kvss_agent.tier2.index import Limits
from kvss_agent.tier2.store import Receipt, Tier2
from kvss_agent.tier2.stores import NotOpen, Stores
from telemetry.histogram import Histogram
from telemetry.metrics import LabelLimits

log = logging.getLogger(__name__)

EXPIRE_SECONDS: Final = 1.0  # between looks at what is too old in tier 2
REFRESH_SECONDS: Final = 3600.0  # between listings of a store that is shared, more or less
LISTING_SHARE: Final = 0.02  # of the time, at most: a bucket of millions takes minutes, and is billed
PULLS_LISTED: Final = 256
PULLS_AT_ONCE: Final = 4


class NotReady(Exception):
    """Nobody can tell before something else is in order."""


class Unknown(Exception):
    """There is no such thing."""


class Agent:
    """Lives on one event loop. The data plane has threads of its own and does not wait for it."""

    def __init__(
        self,
        settings: Settings,
        software: str,
        trust: Trust | None = None,
        *,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Without `trust` it has no certificate and believes no capabilities. `end` is called if the
        agent has to be started anew (`is_broken`)."""
        self.settings = settings
        self.trust = trust
        self.software = software
        self.started_at = time.time()
        self.shards: dict[str, HostedShard] = {}
        self.stores = Stores(settings.state_dir, self._serve_tier2)
        self.redundant = RedundantStores(
            self._shown_to_agents, lambda: self.plane.served, settings.repair_bytes_per_second
        )
        self.tier_requests = TierRequests(
            asyncio.get_running_loop(),
            lambda: list(self.stores.retiring().values()),
            self.redundant,
        )
        self.borrowing = Borrowing(self.shards, self._shown_to_agents)
        self.plane = DataPlane(
            self.shards,
            {},
            self.tier_requests,
            self.borrowing,
            stall_seconds=10,
        )
        self.desired: Desired | None = None
        self.tcp_port = 0  # where it really listens
        self.purges = Purges(
            f"node:{settings.name}",
            self.stores,
            self.shards,
            lambda: [spec.name for spec in self.desired.shards] if self.desired else [],
            self.redundant,
        )
        self.draining = False
        self.is_broken = False  # what runs for as long as the agent has ended
        self._end = end
        self.membership_status = MembershipStatus()  # with the console
        self.progress: dict[str, Progress] = {}
        self.pulls: dict[str, Pull] = {}
        self.background_totals = Totals()
        self._background: dict[str, Background] = {}  # by the shard that comes
        self.limits = LabelLimits()  # of its metrics
        self.http = HttpPolicy(owners=lambda: (CONTROLLER,))
        # A store may take minutes to open, or never answer: shards do not wait for it.
        self._followers = (
            Follower(lambda: self.desired, self._follow, lambda: self._is_refused),
            Follower(lambda: self.desired, self._follow_tier2, lambda: not self.stores.is_settled),
        )
        self._document_lock = asyncio.Lock()  # documents are checked, stored and applied one at a time
        self._work: list[asyncio.Task[None]] = []
        self._pulling = asyncio.Semaphore(PULLS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Apply the stored desired document, and listen."""
        self.settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            raw = await asyncio.to_thread(self._document.read_bytes)
            try:
                self._take(documents.parse(raw))
            except Invalid as problem:
                log.warning("The stored desired document is invalid and is ignored: %s", problem)
        before = self.desired.tier2 if self.desired else None
        await asyncio.to_thread(self.stores.remember, [before] if before else [])
        for one in self._followers:
            one.wake()
        self.plane.listen_unix(self.settings.unix)
        if self.settings.tcp:
            host, port = self.settings.tcp
            self.tcp_port = self.plane.listen_tcp(host, port, self._tls_for_drivers())
        shards, tier2 = self._followers
        for name, work in (
            ("shards", shards.run()),
            ("tier 2", tier2.run()),
            ("expiry", self._expire_forever()),
            ("listing", self._refresh_forever()),
        ):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._break)
            self._work.append(task)

    def _break(self, task: asyncio.Task[None]) -> None:
        """An agent that goes on without this looks well, and follows no document or expires nothing."""
        if not task.cancelled():
            log.critical(
                "The task %s has ended; the agent stops", task.get_name(), exc_info=task.exception()
            )
            self.is_broken = True
            self._end()

    async def stop(self, seconds: float) -> bool:
        """Drain for so many seconds at most, then release all. Whether all connections had ended."""
        self.drain()
        self.stores.call_off(None)
        for task in self._work:
            task.cancel()
        for pull in self.pulls.values():
            pull.cancel()
        gone = await asyncio.to_thread(self.plane.stop, seconds)
        self.borrowing.close()
        await self.redundant.close()
        for shard in list(self.shards.values()):
            await asyncio.to_thread(shard.end, Cause.DRAINING, "the agent stops")
        await self.stores.close()
        return gone

    def drain(self) -> None:
        """Refuse new connections and ask the existing ones to end. Memory stays until `stop`."""
        if not self.draining:
            self.draining = True
            self.plane.drain()

    # The desired document

    async def set_desired(self, raw: bytes) -> Desired:
        """Store a document and begin to apply it. The same document again changes nothing.

        Raises Invalid, and Conflict for a generation that is older, or the same with other contents.
        """
        desired = documents.parse(raw)
        async with self._document_lock:
            return await self._set(desired)

    async def _set(self, desired: Desired) -> Desired:
        if self.draining:
            raise Conflict("The agent is draining.")
        if self.desired and desired.repeats(self.desired):
            return desired
        await asyncio.to_thread(write_durably, self._document, msgspec.json.encode(desired))
        self._take(desired)
        return desired

    def _take(self, desired: Desired) -> None:
        self.desired = desired
        self.plane.secrets = {peer.name: peer.secret for peer in desired.peers}
        self.plane.keys = {peer.name: peer.key for peer in desired.peers if peer.key}
        # Whose files are served and which are nobody's holds for stores that are opened from now on too,
        # however long shards take.
        tags = desired.orgs.tags
        live = None if tags is None else frozenset(map(bytes.fromhex, tags))
        self.stores.serve_only(live)
        self.redundant.serve_only(live)
        # Before there are shards, so that nobody is told that a column is absent which waits in front.
        identities = [spec.identity() for spec in desired.shards]
        self.stores.attend([(one.namespace, one.part) for one in identities])
        self.stores.call_off(desired.tier2)
        for one in self._followers:
            one.wake()

    @property
    def observed_generation(self) -> int:
        """Of the last document of which all was tried."""
        return min(one.observed_generation for one in self._followers)

    @property
    def _document(self) -> Path:
        return self.settings.state_dir / "desired.json"

    # Reconciling

    @property
    def _is_refused(self) -> bool:
        return any(progress.state == "refused" for progress in self.progress.values())

    async def _follow(self, desired: Desired | None) -> None:
        """First what gives memory back, then what takes memory."""
        if desired is None:
            self.redundant.follow((), Limits())
            return
        wanted = {spec.name: spec for spec in desired.shards}
        for name, shard in list(self.shards.items()):
            spec = wanted.get(name)
            if spec is None or spec.identity() != shard.identity:
                del self.shards[name]
                self._background.pop(name, None)
                await asyncio.to_thread(shard.end, Cause.GONE, "the shard was removed")
        for name in [name for name in self.progress if name not in wanted]:
            del self.progress[name]
            self.plane.latencies.pop(name, None)
        smaller = [
            spec
            for spec in desired.shards
            if spec.name in self.shards and spec.slots < self.shards[spec.name].core.slots
        ]
        await asyncio.gather(*(self._provide(spec) for spec in smaller))
        for spec in desired.shards:
            if self.desired is not desired:
                return  # there is a newer document: begin anew
            await self._provide(spec)
        limits = desired.tier2.limits() if desired.tier2 else Limits()
        self.redundant.follow(desired.shards if desired.tier2 else (), limits)

    async def _provide(self, spec: ShardSpec) -> None:
        """Make a shard, or its size, what it should be."""
        progress = self.progress.setdefault(spec.name, Progress())
        shard = self.shards.get(spec.name)
        if shard:
            shard.set_readers(spec.readers)
        if shard and shard.core.slots == spec.slots:
            progress.state, progress.reason = "ready", ""
            return
        progress.state, progress.reason = "allocating", ""
        try:
            before = shard.core.slots if shard else 0
            if spec.slots > before:
                self._check_limit((spec.slots - before) * spec.slot_bytes)
            if shard:
                await asyncio.to_thread(shard.resize, spec.slots, partial(self._report, progress))
            else:
                self.shards[spec.name] = await asyncio.to_thread(self._make, spec, progress)
            progress.state = "ready"
        except (NoMemory, OSError) as error:
            progress.state, progress.reason = "refused", str(error)
            log.warning("Shard %s: %s", spec.name, error)

    def _check_limit(self, more: int) -> None:
        limit, granted = self.settings.memory_bytes, self.granted_bytes + more
        if limit is not None and granted > limit:
            raise NoMemory(f"grants would come to {granted} bytes, and {limit} are allowed")

    def _make(self, spec: ShardSpec, progress: Progress) -> HostedShard:
        identity: ShardIdentity = spec.identity()
        arena = Arena.allocate(
            identity.slot_bytes,
            spec.slots,
            partial(self._report, progress),
            huge_pages=identity.huge_pages,
        )
        return HostedShard(identity, arena, spec.applied, readers=spec.readers, wake_me=self.plane.wake)

    def _report(self, progress: Progress, done: int, total: int) -> None:
        """A grant of many gigabytes takes a while, and must not keep the agent from stopping."""
        if self.draining:
            raise NoMemory("the agent stops")
        progress.report(done, total)

    @property
    def granted_bytes(self) -> int:
        return sum(shard.arena.bytes for shard in list(self.shards.values()))

    async def _follow_tier2(self, desired: Desired | None) -> None:
        if desired is None:  # files that an earlier run left in tier 2 still expire and are purged
            await self.stores.retire(())
            return
        self.tier_requests.is_off = self.tier_requests.is_off and desired.tier2 is None
        await self.stores.use(desired.tier2)
        self.tier_requests.is_off = desired.tier2 is None
        await self.stores.retire(desired.retiring)

    def _serve_tier2(self, store: Tier2 | None) -> None:
        self.tier_requests.store = store

    async def _expire_forever(self) -> None:
        """Drivers find out what is too old when they ask for it. This is for what nobody asks for."""
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            try:
                await self.stores.expire()
            except Failed:
                pass  # counted by the store; there is a next time
            except Exception:
                log.exception("Cannot remove expired columns from tier 2; retrying soon")

    async def _refresh_forever(self) -> None:
        """Agents that share a store should not all list it at once, nor all the time."""
        took = 0.0
        while True:
            pause = max(REFRESH_SECONDS, took / LISTING_SHARE)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
            began = time.monotonic()
            try:
                await self.stores.refresh()
            except Failed:
                pass  # counted by the store; there is a next time
            except Exception:
                log.exception("Cannot list tier 2; retrying in about an hour")
            took = time.monotonic() - began

    def _tls_for_drivers(self) -> ssl.SSLContext | None:
        if self.settings.has_tls_of_console and self.trust:
            return self.trust.for_data
        return self.settings.tls_for_drivers()

    # Verbs

    async def purge(self, *, tag: bytes | None, namespace: bytes | None) -> Receipt:
        """Empty all stores of a tag, a namespace, or both. Raises Failed and ValueError; Conflict where
        there are none, and NotReady where one is not open: files may lie there."""
        try:
            stores = self.stores.everything()
        except NotOpen as why:
            raise NotReady(str(why)) from why
        if not stores:
            raise Conflict("There is no tier 2 here.")
        try:
            redundant = self.redundant.everything()
        except NotOpen as why:
            raise NotReady(str(why)) from why
        for one in redundant.values():  # the holders report what they remove
            await one.purge(tag=tag, namespace=namespace)
        receipts = [await store.purge(tag=tag, namespace=namespace) for store in stores.values()]
        return Receipt(
            sum(one.columns for one in receipts),
            sum(one.bytes for one in receipts),
            max(one.finished_at for one in receipts),
        )

    def pull(self, name: str, address: str, shard: str, as_: str, after: int, slots: list[int]) -> Pull:
        """Begin to fetch slots of a shard from another agent. Raises Unknown, Conflict, ValueError."""
        target = self.shards.get(name)
        if target is None:
            raise Unknown(f"There is no shard {name} here.")
        credentials = self._credentials(as_)
        running = [pull for pull in self.pulls.values() if pull.state == "running"]
        if any(pull.shard == name for pull in running):
            raise Conflict(f"Shard {name} is being pulled already.")
        source = Source(Address.parse(address), shard, credentials, after)
        pull = Pull(secrets.token_hex(8), name, len(slots), driver=as_)
        self.pulls[pull.id] = pull
        for old in [old for old in self.pulls.values() if old.finished_at][: -PULLS_LISTED or None]:
            del self.pulls[old.id]
        task = asyncio.create_task(self._run_pull(pull, target, source, slots))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return pull

    def _credentials(self, driver: str) -> Credentials:
        """What is shown to other agents in a driver's name. Raises Conflict."""
        secret = self.plane.secrets.get(driver)
        tls = self.settings.tls_for_agents()
        if secret is None and tls is None:
            raise Conflict(f"{driver} is not among the peers, so there is no secret to show.")
        certified = self.trust.client_certificate() if self.trust else None
        return Credentials(driver, secret, tls, self.software, certified=certified)

    def _shown_to_agents(self, driver: str) -> Credentials:
        """For borrowing. Raises Lost."""
        try:
            return replace(self._credentials(driver), stall_seconds=STALL_SECONDS)
        except Conflict as error:
            raise Lost(str(error)) from error

    async def _run_pull(self, pull: Pull, shard: HostedShard, source: Source, slots: list[int]) -> None:
        async with self._pulling:
            new = Background(partial(self._pull_budget, pull.shard), self.background_totals)
            background = self._background.setdefault(pull.shard, new)
            await asyncio.to_thread(run_pull, pull, shard, source, slots, background)
        log.info("Pull %s of %s: %s, %d moved", pull.id, pull.shard, pull.state, pull.moved)

    def _pull_budget(self, name: str) -> int | None:
        """By the document of this moment."""
        specs = self.desired.shards if self.desired else ()
        return next((one.pull_bytes_per_second for one in specs if one.name == name), None)

    # What it is

    @property
    def is_ready(self) -> bool:
        """Everything that was asked for is there, and somebody may connect."""
        settled = [progress.state for progress in self.progress.values()]
        desired = self.desired.generation if self.desired else 0
        return (
            not self.draining
            and self.observed_generation == desired
            and all(state == "ready" for state in settled)
            and self.stores.progress.state in ("ready", "off")
        )

    def observed(self) -> dict[str, Any]:
        """What is there, against what was asked for, and why not."""
        desired = self.desired
        return {
            "generation": desired.generation if desired else 0,
            "observed_generation": self.observed_generation,
            "name": self.settings.name,
            "software": self.software,
            "mover": native.current().name,
            "protocol": [constants.VERSION_MIN, constants.VERSION],
            "started_at": self.started_at,
            "ready": self.is_ready,
            "draining": self.draining,
            "console": self.membership_status.shown(),
            "memory": {
                "granted_bytes": self.granted_bytes,
                "limit_bytes": self.settings.memory_bytes,
                "available_bytes": available_bytes(),
            },
            "tier2": {**asdict(self.stores.progress), "retiring": self.stores.shown()},
            "shards": [self.shard(spec.name) for spec in (desired.shards if desired else ())],
        }

    def shard(self, name: str) -> dict[str, Any]:
        """One shard as it is. Raises Unknown."""
        progress = self.progress.get(name)
        desired = self.desired.shards if self.desired else ()
        spec = next((spec for spec in desired if spec.name == name), None)
        if spec is None:
            raise Unknown(f"There is no shard {name} here.")
        shard = self.shards.get(name)
        progress = progress or Progress()
        answer: dict[str, Any] = {
            "name": name,
            "state": progress.state,
            "reason": progress.reason,
            "progress": {"done_bytes": progress.done, "total_bytes": progress.total},
            "wanted_slots": spec.slots,
            "slots": shard.core.slots if shard else 0,
            "slot_bytes": spec.slot_bytes,
        }
        if shard:
            answer |= self._statistics(shard)
        if redundancy := self.redundant.shown(name):
            answer["redundancy"] = {**redundancy, "holders_since": self._holders_since(spec)}
        return answer

    def _holders_since(self, spec: ShardSpec) -> float:
        """When the newest of the holders came that are counted; 0 while a newer document is being
        applied, for then the counts may still be those of former holders."""
        is_applied = self.desired is not None and self.observed_generation == self.desired.generation
        if not is_applied or spec.redundancy is None:
            return 0.0
        return max(one.since for one in spec.redundancy.holders)

    def _statistics(self, shard: HostedShard) -> Mapping[str, Any]:
        latencies = self.plane.latencies_of(shard.identity.name)
        state = shard.state()
        return {
            "incarnation": shard.incarnation.hex(),
            **state,
            "evict_seconds": _quantiles(latencies.evict),
            "refill_seconds": _quantiles(latencies.refill),
            "evicted_bytes": latencies.evicted_bytes,
            "refilled_bytes": latencies.refilled_bytes,
            "cpu_seconds": round(latencies.cpu_seconds, 6),
        }


def _quantiles(histogram: Histogram) -> dict[str, float | int | None]:
    return {
        "count": histogram.count,
        "p50": histogram.quantile(0.5),
        "p99": histogram.quantile(0.99),
    }
