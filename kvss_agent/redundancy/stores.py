"""The redundant tier 2 of an agent's shards: each shard that its document gives holders has a store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kvss_agent import native
from kvss_agent.client.connection import Credentials
from kvss_agent.desired import Progress, RedundancySpec, ShardSpec
from kvss_agent.limits.background import Background, Fastest, Measure, Totals
from kvss_agent.redundancy.erasure_code import ErasureCode, NoLibrary
from kvss_agent.redundancy.fragments import AT_ONCE, Fragments
from kvss_agent.redundancy.holder import Holder
from kvss_agent.redundancy.layout import fragment_slot_bytes
from kvss_agent.shard.seal import HEADER_BYTES
from kvss_agent.tier2.backend import Failed
from kvss_agent.tier2.index import Caps, Limits
from kvss_agent.tier2.store import Tier2
from kvss_agent.tier2.stores import NO_CAP, NotOpen

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 10.0  # between attempts to open
# Beside evicts and refills, which wait behind what one holder sends at once.
BESIDE_PIECE_BYTES: Final = 1 << 20
# Of columns, of all shards of the agent, unless a setting says otherwise. It leaves more than 99 of 100
# evicts alone that never pause, and is no lower, since what was lost has to be repaired before more is.
BESIDE_BYTES_PER_SECOND: Final = 3 << 20
IN_USE_SECONDS: Final = 1.0  # since the last evict or refill: somebody is there
LOOK_SECONDS: Final = 0.1  # between looks whether somebody still is
REPAIR_LOOK_SECONDS: Final = 1.0  # between looks for files that lack fragments
REACH_SECONDS: Final = 5.0  # between looks whether holders can be reached
LIST_SECONDS: Final = 3600.0  # after which holders are asked again what they have
# For which what nobody has asked for rests once another agent has superseded this one at a holder: that
# may be the home of the shard by now, and stores nothing for a minute after each time.
SUPERSEDED_SECONDS: Final = 600.0
THREADS: Final = 4

CredentialsOf = Callable[[str], Credentials]


@dataclass(eq=False, slots=True)
class _Redundant:
    """Of one shard."""

    spec: RedundancySpec
    identity: tuple[str, str, str, int]  # driver, namespace, part, slot bytes
    background: Background  # of what is moved to and from its holders, spills and repair
    beside: Measure = field(default_factory=Fastest)  # of columns that are repaired beside evicts
    progress: Progress = field(default_factory=Progress)
    fragments: Fragments | None = None
    store: Tier2 | None = None  # once it is open
    task: asyncio.Task[None] | None = None
    _at_home: float = field(default_factory=time.monotonic)

    def is_home(self, now: float) -> bool:
        """Whether what nobody has asked for may be done: not soon after another agent has superseded
        this one at a holder."""
        if self.fragments is None or not self.fragments.is_superseded:
            self._at_home = now
        return not 0 < now - self._at_home < SUPERSEDED_SECONDS


class _Use:
    """Of this agent by its drivers: whether there is any."""

    def __init__(self, served: Callable[[], object]) -> None:
        self._served, self._until = served, 0.0
        self._seen: object = None

    def is_there(self, now: float) -> bool:
        """Whether anything was served within the last IN_USE_SECONDS, as far as one knows."""
        if (served := self._served()) != self._seen:
            self._seen, self._until = served, now + IN_USE_SECONDS
        return now < self._until


class RedundantStores:
    """Lives on one event loop."""

    def __init__(
        self,
        credentials: CredentialsOf,
        served: Callable[[], object] = lambda: 0,
        beside_bytes_per_second: int = BESIDE_BYTES_PER_SECOND,
    ) -> None:
        """`credentials`: what is shown to holders in a driver's name. Raises Lost if there are none.
        `served`: something else each time that drivers of this agent have evicted or refilled, beside
        which so many bytes of columns are repaired per second."""
        self.beside_bytes_per_second = beside_bytes_per_second
        self.totals = Totals()  # of spills and repair
        self.repair_bytes = 0
        # Columns that holders did not take, by why. Each from 0, so that an increase is seen.
        self.stored_alone = Counter(dict.fromkeys(("failed", "full", "over_budget"), 0))
        self._past_spills: Counter[str] = Counter()  # of stores that are closed
        self._past_recalls: Counter[str] = Counter()
        self._credentials, self._use = credentials, _Use(served)
        self._beside = Background(lambda: self.beside_bytes_per_second)  # of repair, while there is use
        self._redundant: dict[str, _Redundant] = {}  # by shard
        self._ending: dict[asyncio.Task[None], str] = {}  # of former ones, and their shards
        self._is_told = False  # which shards have one
        self._live: Collection[bytes] | None = None
        self._limits = Limits()

    # What there is

    def of(self, shard: str) -> Tier2 | None:
        """The open store of a shard; None if it has none, or it is not open."""
        one = self._redundant.get(shard)
        return one.store if one else None

    def has(self, shard: str) -> bool:
        """Whether a shard should have one."""
        return shard in self._redundant

    @property
    def opened(self) -> list[Tier2]:
        return [one.store for one in self._redundant.values() if one.store]

    def everything(self, shards: Collection[str] | None = None) -> dict[str, Tier2]:
        """By shard, all that may have files, or those of these shards. Raises NotOpen."""
        found = {}
        if not self._is_told:
            raise NotOpen("Nobody knows yet which shards are stored redundantly.")
        # What is on its way there may still arrive.
        for shard in self._ending.values():
            if shards is None or shard in shards:
                raise NotOpen(f"The redundant tier 2 of shard {shard} is being closed.")
        for shard, one in self._redundant.items():
            if shards is not None and shard not in shards:
                continue
            if one.store is None:
                reason = one.progress.reason or one.progress.state
                raise NotOpen(f"The redundant tier 2 of shard {shard} is not open yet: {reason}")
            found[f"redundant:{shard}"] = one.store
        return found

    def shown(self, shard: str) -> dict[str, Any] | None:
        one = self._redundant.get(shard)
        if one is None:
            return None
        fragments, stats = one.fragments, one.store.stats() if one.store else None
        return {
            "state": one.progress.state,
            "reason": one.progress.reason,
            "holders": len(one.spec.holders),
            "columns": stats.columns if stats else 0,
            "incomplete": fragments.incomplete if fragments else 0,
            "repaired": fragments.repaired if fragments else 0,
            "parity_reads": fragments.parity_reads if fragments else 0,
            "holder_faults": fragments.holder_faults if fragments else 0,
            "hedges": fragments.hedges if fragments else 0,
            "hedges_over_budget": fragments.hedges_over_budget if fragments else 0,
            "late": fragments.late if fragments else [],
            "incomplete_at": fragments.incomplete_at() if fragments else [],
            "most_lacking": fragments.most_lacking if fragments else 0,
            "unreachable": fragments.unreachable() if fragments else [],
        }

    def shards(self) -> list[str]:
        return [*self._redundant]

    # Following a document

    def serve_only(self, tags: Collection[bytes] | None) -> None:
        """As `Stores.serve_only`."""
        self._live = tags
        for store in self.opened:
            store.live = tags

    def follow(self, specs: Iterable[ShardSpec], limits: Limits) -> None:
        """Have a store for each of these shards that has holders. Nobody waits for one to open or to
        close: that goes on behind, and opening is tried again."""
        self._limits, self._is_told = limits, True
        wanted = {spec.name: spec for spec in specs if spec.redundancy}
        for name, one in [*self._redundant.items()]:
            spec = wanted.get(name)
            if spec and spec.redundancy and _is_same(spec, one):
                one.spec = spec.redundancy
            else:
                del self._redundant[name]
                ending = asyncio.create_task(self._end(one), name=f"end of redundancy of {name}")
                self._ending[ending] = name
                ending.add_done_callback(lambda done: self._ending.pop(done, None))
        for name, spec in wanted.items():
            if name not in self._redundant and spec.redundancy:
                one = self._redundant[name] = self._new(spec.redundancy, _identity(spec))
                one.task = asyncio.create_task(self._run(one, spec), name=f"redundancy of {name}")
        for store in self.opened:
            store.limits = limits

    def _new(self, spec: RedundancySpec, identity: tuple[str, str, str, int]) -> _Redundant:
        def budget() -> int | None:
            return made.spec.bytes_per_second  # of the document of this moment

        made = _Redundant(spec, identity, Background(budget, self.totals))
        return made

    async def close(self) -> None:
        redundant, self._redundant = self._redundant, {}
        await asyncio.gather(*map(self._end, redundant.values()), *self._ending)

    async def _end(self, one: _Redundant) -> None:
        await _closed(one)
        if one.store:
            stats = one.store.stats()
            self._past_spills.update(stats.spills)
            self._past_recalls.update(stats.recalls)

    def spills(self) -> dict[str, int]:
        """Since the start, by what became of them."""
        return dict(sum((Counter(one.stats().spills) for one in self.opened), self._past_spills))

    def recalls(self) -> dict[str, int]:
        return dict(sum((Counter(one.stats().recalls) for one in self.opened), self._past_recalls))

    # Running one

    async def _run(self, one: _Redundant, spec: ShardSpec) -> None:
        """Open it, then expire and repair, until it is cancelled."""
        while one.store is None:
            try:
                await self._open(one, spec)
            except (Failed, NoLibrary, ValueError, OSError) as error:
                one.progress = Progress("refused", str(error))
                log.warning("Redundancy of shard %s: %s", spec.name, error)
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                log.exception("Redundancy of shard %s can't be opened; retrying soon", spec.name)
                one.progress = Progress("refused", "Internal error; see the agent's log.")
                await asyncio.sleep(RETRY_SECONDS)
        async with asyncio.TaskGroup() as group:  # a repair may take hours, and the rest goes on
            group.create_task(self._keep(one, one.store, spec.name))
            group.create_task(self._go_on_repairing(one, spec.name))

    async def _keep(self, one: _Redundant, store: Tier2, name: str) -> None:
        """Remove what is too old or nobody's, reach holders and list what they have."""
        reached = listed = time.monotonic()
        while True:
            await asyncio.sleep(REPAIR_LOOK_SECONDS)
            now = time.monotonic()
            steps = list[Callable[[], Awaitable[object]]]()
            list_after = RETRY_SECONDS if _needs_listing(one) else LIST_SECONDS
            if one.is_home(now):
                steps = [store.sweep, store.expire]
                if now - listed > list_after:
                    listed = now
                    steps.insert(0, store.rebuild)
            if now - reached > REACH_SECONDS and one.fragments:
                reached = now
                steps.insert(0, partial(asyncio.to_thread, one.fragments.reach_holders))
            for step in steps:  # one may need a holder that is away, and the others not
                await _tried(name, step)

    async def _go_on_repairing(self, one: _Redundant, name: str) -> None:
        while True:
            await asyncio.sleep(REPAIR_LOOK_SECONDS)
            if one.is_home(time.monotonic()):
                await _tried(name, partial(self._repair, one))

    async def _open(self, one: _Redundant, spec: ShardSpec) -> None:
        one.progress = Progress("indexing", one.progress.reason)
        code = ErasureCode(one.spec.data, one.spec.parity)
        payload = fragment_slot_bytes(spec.slot_bytes, one.spec.data) - HEADER_BYTES
        holders = [
            Holder(its.address, its.shard, partial(self._credentials, spec.driver), payload, its.since)
            for its in one.spec.holders
        ]
        namespace = bytes.fromhex(spec.namespace)
        one.fragments = Fragments(code, holders, namespace, spec.part, spec.slot_bytes)
        mover = native.current()
        store = Tier2(
            one.fragments,
            Caps(NO_CAP, NO_CAP),
            threads=THREADS,
            mover=mover,
            background=one.background,
            share=code.fragments / code.data,
        )
        store.live, store.limits = self._live, self._limits
        native.follow(store)
        try:
            await store.open(one.progress.report)
        except BaseException:
            await store.close()
            raise
        one.store = store
        one.progress = Progress("ready")

    async def _repair(self, one: _Redundant) -> None:
        """All that can be repaired now, piece by piece. Beside evicts and refills from one holder after
        the other and with rests, so that hardly any waits behind it; with nobody there, from all holders
        at once, as fast as it may."""
        fragments, store, background = one.fragments, one.store, one.background
        if not fragments or not store:
            return
        tries, slot_bytes = fragments.incomplete, one.identity[-1]
        while tries > 0 and fragments.some_incomplete(1) and one.is_home(time.monotonic()):
            is_beside = self._use.is_there(time.monotonic())
            most = _files_at_once(one, background.piece(), is_beside=is_beside)
            if is_beside:
                await self._rest_beside(most * slot_bytes)
            some = fragments.some_incomplete(most)
            tries -= len(some)
            for address in some:
                if store.is_busy(address):  # what comes to be known may lack some
                    fragments.put_off(address)
                elif not store.knows(address):
                    fragments.forget([address])
            repair = partial(fragments.repair, one_by_one=is_beside)
            began = time.monotonic()
            size = await store.while_read(some, repair)
            if size is None:  # they were removed meanwhile
                continue
            self.repair_bytes += size
            now = time.monotonic()
            background.moved(size, now - began, now, one.beside if is_beside else None)
            await asyncio.sleep(background.rest(now, size))

    async def _rest_beside(self, size: int) -> None:
        """Until so many bytes may be moved beside evicts and refills, or there are none any more."""
        now = time.monotonic()
        until = now + (self._beside.book(size, now) or 0.0)
        while now < until and self._use.is_there(now):
            await asyncio.sleep(min(LOOK_SECONDS, until - now))
            now = time.monotonic()


async def _tried(name: str, step: Callable[[], Awaitable[object]]) -> None:
    """Whatever fails is tried again soon."""
    try:
        await step()
    except Failed as error:
        log.info("Redundancy of shard %s: %s", name, error)
    except Exception:
        log.exception("Redundancy of shard %s: a step failed; retrying soon", name)


def _files_at_once(one: _Redundant, piece: int, *, is_beside: bool) -> int:
    """How many files to repair together, which costs little more than one: of those a piece comes at
    once, from all holders or from one of them, and others wait behind it."""
    at_once = one.identity[-1]
    if is_beside:
        piece, at_once = min(piece, BESIDE_PIECE_BYTES), -(-at_once // one.spec.data)
    return max(1, min(AT_ONCE, piece // at_once))


def _needs_listing(one: _Redundant) -> bool:
    return one.fragments is not None and one.fragments.needs_listing


def _identity(spec: ShardSpec) -> tuple[str, str, str, int]:
    return spec.driver, spec.namespace, spec.part, spec.slot_bytes


def _is_same(spec: ShardSpec, one: _Redundant) -> bool:
    """Whether nothing has changed but the budget. One that another agent has superseded begins anew
    with another document: that one still says that we are the home of the shard."""
    told, now = spec.redundancy, one.spec
    if told is None or _identity(spec) != one.identity:
        return False
    if one.fragments and one.fragments.is_superseded and told is not now:
        return False
    return (told.data, told.parity, told.holders) == (now.data, now.parity, now.holders)


async def _closed(one: _Redundant) -> None:
    if one.fragments:
        one.fragments.close()  # first, so that no holder can hold it up
    if one.task:
        one.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await one.task
    if one.store:
        await one.store.close()
