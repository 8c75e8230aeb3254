"""A thinned fleet in virtual time: conversations, brains, replicas and links, and what is lost of them.

A stamp is whole, and there are fewer of them than at full size; each replica gets as many requests as it
would there, and there is a brain for each stamp. One seed decides everything but processor times.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from benchmarks.harness import percentile
from benchmarks.scale import fleet, traffic
from benchmarks.scale.brains import EXCHANGE_SECONDS, Brain, desired, spec_of
from benchmarks.scale.cache import WALL, chunks
from benchmarks.scale.links import TICK, Fluid
from benchmarks.scale.replicas import Job, Replica, Told
from benchmarks.scale.sizes import GBIT, MODELS, WARM, Model
from console.placement.planner import plan
from console.placement.rails import restore_rails
from console.placement.topology import Tier
from inference_brain.maps import CacheMaps
from swdriver_shim.cache_map.publisher import PERIOD_SECONDS
from swdriver_shim.keys import Keys

# From the loss of nodes until their streams are placed anew: the grace period of sessions, and what
# `benchmarks.lost_agent` measured beyond it.
REPLACED_SECONDS: Final = 20.0 + 1.8
NOTICED_SECONDS: Final = 1.0  # until brains send what was at a lost replica to another one
PARTS: Final = ("decide", "learn", "exchange", "map messages", "map updates", "cache", "links")


@dataclass(slots=True)
class Second:
    """Of one second of virtual time: the requests whose first token came in it."""

    asked: int = 0  # tokens
    hit: int = 0
    seconds: list[float] = field(default_factory=list)  # to the first token

    @property
    def hit_rate(self) -> float:
        return self.hit / max(1, self.asked)


@dataclass(frozen=True, slots=True)
class Lost:
    """What a loss took, and what placing anew did. `kept`: streams that stayed where they are."""

    replicas: int
    plan_cpu: float
    streams: int
    kept: int
    off_rails: float  # share of bytes afterwards
    rail_moves: int
    rail_bytes: int
    off_rails_restored: float  # share of WIO once these moves are made


class World:
    def __init__(self, stamps: int, seconds: float, seed: int = 1, share: float = 1.0) -> None:
        """Requests come for so many seconds after `WARM`. With `share` there are so much fewer of them,
        and engines, caches and links have so much less: as busy, and as long in keeping a column."""
        self.now = 0.0
        self.stamps, self.ends = stamps, WARM + seconds
        self.asks = traffic.asks(stamps, seconds, seed, share)
        self.site = fleet.site(stamps, seed)
        self.topology = self.site.fleet
        self.cpu = dict.fromkeys(PARTS, 0.0)
        self.counts: dict[str, int] = defaultdict(int)
        self.told = Told()
        self.by_second: dict[int, Second] = defaultdict(Second)
        self.answered: dict[int, int] = defaultdict(int)  # first tokens, by request
        self.finished: dict[int, int] = defaultdict(int)
        with self._spent("plan"):
            placed = plan(self.topology, self.site.streams())
        self.places = fleet.places_of(placed)
        self.routes = {one.stream: one.route for one in placed.placed}
        self.makers = [traffic.makers(spec_of(model.name).namespace()) for model in MODELS]
        self.replicas = [
            Replica(
                number,
                one.name,
                replace(one.model, prefill=share * one.model.prefill),
                int(share * one.columns),
                self._makers_of(one.model),
                self.told,
            )
            for number, one in enumerate(self.site.replicas)
        ]
        self.number = {one.name: one.number for one in self.replicas}
        names = [one.name for one in self.replicas]
        paths = fleet.paths(self.routes, self.places)
        self.gbits = {link: share * gbits for link, gbits in self.site.gbits.items()}
        self.inward = Fluid(names, self.gbits, paths)  # to engines: refills
        self.outward = Fluid(names, self.gbits, paths)  # evicts
        self.maps = CacheMaps(lambda: self.now + WALL, rows_max=1 << 21)
        told = desired({model.name: self._names_of(model.name) for model in MODELS})
        self.brains = [
            Brain(number, self.maps, told, lambda: self.now, seed) for number in range(stamps)
        ]
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, str, int]] = []
        self._order = 0
        self._ticks = False
        self._next = 0
        self._in_flight = 0
        self._again: list[Job] = []
        self.entries_changed = 0
        self.message_bytes = 0

    def _makers_of(self, model: Model) -> list[Keys]:
        return self.makers[MODELS.index(model)]

    def _names_of(self, model: str) -> list[str]:
        return [one.name for one in self.replicas if one.model.name == model and not one.is_lost]

    @contextmanager
    def _spent(self, part: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.cpu[part] = self.cpu.get(part, 0.0) + time.thread_time() - began

    # Time

    def warm(self) -> None:
        """Fill caches with the requests before `WARM`: each conversation at a replica of its own."""
        of_model = [[one for one in self.replicas if one.model.name == model.name] for model in MODELS]
        while self._next < len(self.asks) and (one := self.asks[self._next]).at < WARM:
            self._next += 1
            among = of_model[one.model]
            replica = among[one.conversation // len(MODELS) % len(among)]
            replica.fill(one.org, traffic.chunk_ends(one))
        self.now = WARM
        for replica in self.replicas:
            self._publish(replica)
            part = replica.number / len(self.replicas)  # they report one after the other
            self._at(WARM + PERIOD_SECONDS * (1 + part), "map", replica.number)
        self.cpu = dict.fromkeys(PARTS, 0.0)
        self.counts.clear()
        self.entries_changed = self.message_bytes = 0
        self._at(WARM + EXCHANGE_SECONDS, "exchange", 0)

    def run(self, until: float) -> None:
        """Until then, or, if nothing more comes, until all is answered."""
        while True:
            at = self._events[0][0] if self._events else math.inf
            comes = self.asks[self._next].at if self._next < len(self.asks) else math.inf
            if min(at, comes) > until:
                self.now = until
                return
            if comes <= at:
                self.now = comes
                self._next += 1
                self._arrive(Job(self.asks[self._next - 1], comes))
                continue
            self.now = at
            _, _, kind, number = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(number)

    def finish(self) -> None:
        """Answer what is in flight."""
        while self._in_flight or self.inward.active or self.outward.active:
            self.run(self.now + 1.0)

    def _at(self, at: float, kind: str, number: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, number))

    # Requests

    def _arrive(self, job: Job) -> None:
        self._in_flight += 1
        self.counts["requests"] += 1
        job.brain = self._rng.randrange(len(self.brains))
        self._send(job)

    def _send(self, job: Job) -> None:
        one, brain = job.ask, self.brains[job.brain]
        maker, keys = self.makers[one.model][one.org], traffic.columns(one)
        job.chunks = chunks(keys)
        with self._spent("decide"):
            name = brain.choose(one, MODELS[one.model].name, maker, keys)
        replica = self.replicas[self.number[name]]
        if replica.is_lost:  # brains have not noticed
            self._again.append(job)
            replica.jobs[one.number] = job
            return
        with self._spent("cache"):
            cached = replica.accept(job)
        if cached > 0:
            self._move(self.inward, replica, cached, job)
        else:
            self._refilled(replica, job)

    def _move(self, fluid: Fluid, replica: Replica, tokens: float, job: Job) -> None:
        fluid.begin(replica.number, tokens * replica.model.token_bytes, job)
        if not self._ticks:
            self._ticks = True
            fluids = (self.inward, self.outward)
            for one in fluids:  # nothing has moved since the last tick
                one.tick(self.now)
            self._at((math.floor(self.now / TICK) + 1) * TICK, "tick", 0)

    def _refilled(self, replica: Replica, job: Job) -> None:
        due = replica.engine.due
        replica.refilled(job, self.now)
        if replica.engine.due != due:
            self._at(replica.engine.due, "engine", replica.number)

    def _on_tick(self, _: int) -> None:
        with self._spent("links"):
            inward, outward = self.inward.tick(self.now), self.outward.tick(self.now)
        for number, tag in inward:
            assert isinstance(tag, Job)
            self._refilled(self.replicas[number], tag)
        for number, tag in outward:
            assert isinstance(tag, Job)
            with self._spent("cache"):
                self.replicas[number].stored(tag)
        self._ticks = bool(self.inward.active or self.outward.active)
        if self._ticks:
            self._at(self.now + TICK, "tick", 0)

    def _on_engine(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.engine.due != self.now or replica.is_lost:
            return  # it was to be later, or is done
        replica.engine.advance()
        if replica.engine.due < math.inf:
            self._at(replica.engine.due, "engine", number)
        for of, job, at in self.told.first:
            self._first_token(self.replicas[of], job, at)
        for of, job in self.told.last:
            self._last_token(self.replicas[of], job)
        self.told.first.clear()
        self.told.last.clear()

    def _first_token(self, replica: Replica, job: Job, at: float) -> None:
        one, model = job.ask, replica.model
        self.answered[one.number] += 1
        second = self.by_second[int(at)]
        second.asked += one.tokens
        second.hit += int(job.cached)
        second.seconds.append(at - job.sent + model.timing.request)
        self.counts["hit tokens"] += int(job.cached)
        self.counts["computed tokens"] += one.tokens - int(job.cached)
        with self._spent("learn"):
            self.brains[job.brain].first_token(one.number, model.name, int(job.cached))
        with self._spent("cache"):
            tokens = replica.begin_store(job)
        self.counts["stored tokens"] += tokens
        if tokens:
            self._move(self.outward, replica, tokens, job)

    def _last_token(self, replica: Replica, job: Job) -> None:
        self._in_flight -= 1
        self.finished[job.ask.number] += 1
        replica.jobs.pop(job.ask.number)
        self.brains[job.brain].end(job.ask.number, replica.model.name)

    # What goes on beside

    def _on_map(self, number: int) -> None:
        replica = self.replicas[number]
        if not replica.is_lost:
            self._publish(replica)
            self._at(self.now + PERIOD_SECONDS, "map", number)

    def _publish(self, replica: Replica) -> None:
        before = replica.follower.changes
        with self._spent("map messages"):
            messages = replica.messages(self.now)
        mirror = self.maps.mirror(replica.name)
        assert mirror
        with self._spent("map updates"):
            for raw in messages:
                mirror.read(raw, self.now)
        self.counts["messages"] += len(messages)
        self.message_bytes += sum(map(len, messages))
        self.entries_changed += replica.follower.changes - before

    def _on_exchange(self, _: int) -> None:
        with self._spent("exchange"):
            reports = [brain.report() for brain in self.brains]
            for at, brain in enumerate(self.brains):
                brain.hear(reports[:at] + reports[at + 1 :])
        self.counts["exchanges"] += len(self.brains)
        self._at(self.now + EXCHANGE_SECONDS, "exchange", 0)

    # Losses

    def lose_leaf(self, leaf: str) -> set[int]:
        """Its links carry nothing from now on. Returns the replicas that are cut off."""
        cut = {
            self.number[stream.session]
            for stream, its in self.routes.items()
            if leaf in (its.port_leaf, its.nic_leaf)
        }
        for number in cut:
            replica = self.replicas[number]
            replica.cut = True
            for tag in self.inward.drop(number):
                assert isinstance(tag, Job)
                tag.cached = 0
                self._refilled(replica, tag)
            for tag in self.outward.drop(number):
                assert isinstance(tag, Job)
                replica.stored(tag, failed=True)
        return cut

    def replan_leaf(self, leaf: str, cut: set[int]) -> Lost:
        """Place the streams of these replicas where the leaf is gone, and go on."""
        self.topology = fleet.without_leaf(self.topology, leaf)
        wanted = [one for one in self.places if self.number[one.session] in cut]
        began = time.thread_time()
        found = plan(self.topology, wanted, self.places)
        took = time.thread_time() - began
        assert not found.unplaced
        kept = sum(not one.moves for one in found.placed)
        self.places |= fleet.places_of(found)
        self.routes = fleet.routes(self.topology, self.places)
        self._set_paths()
        for number in cut:
            self.replicas[number].cut = False
        restored = restore_rails(self.topology, self.places)
        left = restored.after.spine_wio + restored.after.leaf_wio
        total = sum(one.wio for one in self.places)
        return Lost(
            len(cut), took, len(wanted), kept, self._off_rails(),
            len(restored.moves), restored.bytes, left / total,
        )  # fmt: skip

    def lose_stamp(self, stamp: int) -> list[int]:
        """Its boxes, nodes and replicas are gone. Returns the numbers of the replicas."""
        gone = [
            self.number[one.name]
            for one in self.site.replicas
            if one.stamp == stamp and not self.replicas[self.number[one.name]].is_lost
        ]
        for number in gone:
            replica = self.replicas[number]
            replica.is_lost = True
            for fluid in (self.inward, self.outward):
                fluid.drop(number)
            self._again += replica.jobs.values()
        return gone

    def notice(self, gone: list[int]) -> None:
        """Brains send what was at lost replicas elsewhere, and do not send there any more."""
        told = desired({model.name: self._names_of(model.name) for model in MODELS})
        again, self._again = self._again, []
        for job in again:
            if self.answered[job.ask.number]:
                self._in_flight -= 1  # the client gets no more of it
                self.finished[job.ask.number] += 1
            self.brains[job.brain].end(job.ask.number, MODELS[job.ask.model].name)
        for brain in self.brains:
            brain.follow(told)
        self.places = {
            stream: node
            for stream, node in self.places.items()
            if self.number[stream.session] not in gone
        }
        self.routes = {stream: self.routes[stream] for stream in self.places}
        self._set_paths()
        for job in again:
            self.counts["sent again"] += 1
            if not self.answered[job.ask.number]:
                job.cached = 0
                self._send(job)

    def _set_paths(self) -> None:
        paths = fleet.paths(self.routes, self.places)
        for fluid in (self.inward, self.outward):
            fluid.set_paths(paths)

    def _off_rails(self) -> float:
        total = sum(one.memory_bytes for one in self.routes)
        others = (one for one, its in self.routes.items() if its.tier is not Tier.RAIL)
        return sum(one.memory_bytes for one in others) / total

    # What came of it

    def between(self, start: float, end: float) -> Second:
        found = Second()
        for at in range(int(start), int(end)):
            one = self.by_second[at]
            found.asked += one.asked
            found.hit += one.hit
            found.seconds += one.seconds
        return found

    def back_after(self, lost_at: float, before: Second, until: float) -> tuple[float, float]:
        """Seconds after which the hit rate, and the mean time to the first token, are back to 90 % of
        what they were, and stay so; NaN if they are not."""
        limit = 0.9 * before.hit_rate, sum(before.seconds) / len(before.seconds) / 0.9
        since = [lost_at, lost_at]
        for at in range(math.ceil(lost_at), int(until)):
            one = self.between(at, at + 1)
            if one.hit_rate < limit[0]:
                since[0] = at + 1
            if one.seconds and sum(one.seconds) / len(one.seconds) > limit[1]:
                since[1] = at + 1
        hit, ttft = (one - lost_at if one < int(until) else math.nan for one in since)
        return hit, ttft

    def busiest(self, seconds: float) -> dict[str, float]:
        """Of each kind of link, the share of its capacity that the fullest has used, either way."""
        found: dict[str, float] = {"nic": 0.0, "port": 0.0, "spine": 0.0}
        for fluid in (self.inward, self.outward):
            for link, size in fluid.totals()[1].items():
                used = size / seconds / (self.gbits[link] * GBIT)
                found[link[0]] = max(found[link[0]], used)
        return found

    def crossing(self) -> float:
        """The share of all bytes that crossed the spine."""
        moved = crossed = 0.0
        for fluid in (self.inward, self.outward):
            total, links = fluid.totals()
            moved += total
            crossed += sum(size for link, size in links.items() if link[0] == "spine") / 2
        return crossed / moved if moved else 0.0

    def digest(self) -> tuple[object, ...]:
        """Equal for runs that were equal."""
        every = [value for at in sorted(self.by_second) for value in self.by_second[at].seconds]
        return (
            len(every), sum(every), dict(self.counts), self.inward.totals()[0],
            self.outward.totals()[0], self.entries_changed, self.maps.table.rows,
        )  # fmt: skip


def times(one: Second) -> tuple[float, float, float]:
    """Mean, p50 and p95 of the seconds to the first token."""
    return (
        sum(one.seconds) / len(one.seconds),
        percentile(one.seconds, 0.5),
        percentile(one.seconds, 0.95),
    )
