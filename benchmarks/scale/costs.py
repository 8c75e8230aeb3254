"""What each part takes of a processor, by size: `cost = a · n^b`, with the error of b."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmarks.harness import progress
from benchmarks.scale import fleet, traffic
from benchmarks.scale.brains import Brain, desired, spec_of
from benchmarks.scale.cache import WALL, Compared, of_ledger, of_model
from benchmarks.scale.sizes import BOXES, MODELS, NODES
from benchmarks.scale.traffic import Ask
from console.placement.grants import streams
from console.placement.plan import Plan
from console.placement.planner import plan
from inference_brain.choice import Load
from inference_brain.maps import CacheMaps, DriverPlace
from inference_brain.maps.table import ROWS_MAX
from swdriver_shim.cache_map.codec import (
    NAME_BYTES,
    PREFIX,
    SPACE_BYTES,
    Message,
    Section,
    entry,
    in_parts,
    pack_values,
)

MEDIUM: Final = MODELS[1]
SPACES: Final = 100  # orgs whose entries a message has
ENTRIES: Final = 2_000  # of each driver, while decisions are measured
LOADS: Final = 250  # replicas that a brain of many has something at


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a processor by size. `power` and `error`: of the fit, NaN for fewer than three."""

    name: str
    size: str  # what is counted
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]

    def fit(self) -> tuple[float, float, float]:
        """The factor, the exponent, and the exponent's standard error."""
        x, y = np.log(np.array(self.points)).T
        power, factor = np.polyfit(x, y, 1)
        left = y - (power * x + factor)
        spread = float(((x - x.mean()) ** 2).sum())
        error = math.sqrt(float((left**2).sum()) / max(1, x.size - 2) / spread)
        return math.exp(factor), float(power), error

    def at(self, size: float) -> float:
        """By the line between the two nearest sizes in logarithms; beyond them by the fit."""
        if not self.points[0][0] <= size <= self.points[-1][0]:
            factor, power, _ = self.fit()
            return float(factor * size**power)
        x, y = np.log(np.array(self.points)).T
        return math.exp(float(np.interp(math.log(size), x, y)))


def curve(name: str, size: str, sizes_: Sequence[int], cost: Callable[[int], float]) -> Curve:
    found = []
    for one in sizes_:
        progress(f"{name} at {one:,} {size}")
        gc.collect()
        found.append((float(one), cost(one)))
    return Curve(name, size, tuple(found))


# The planner


@dataclass(frozen=True, slots=True)
class Planned:
    whole: Curve
    one_more: Curve
    stamp: tuple[float, int, int]  # seconds, streams, and bytes that are granted anew
    unplaced: int
    unplaced_of_stamp: int
    crossing: float  # share of WIO


def planner(stamps: Sequence[int]) -> Planned:
    """A plan of the whole fleet, of a replica more, and of all replicas of a lost stamp on spare boxes
    of others."""
    whole, more = [], []
    stamp, unplaced, again_unplaced, crossing = (0.0, 0, 0), 0, 0, 0.0
    for count in stamps:
        progress(f"plans of {count * NODES:,} nodes")
        site = fleet.site(count)
        wanted = site.streams()
        seconds, found = _timed(lambda: plan(site.fleet, wanted))  # noqa: B023
        whole.append((float(count * NODES), seconds))
        unplaced, crossing = len(found.unplaced), found.cost.spine_wio / sum(s.wio for s in wanted)
        places = fleet.places_of(found)
        spare = fleet.moved_to(site.fleet, site.replicas[0], 0, [f"cs000.{BOXES - 1:02}"])
        new = streams(site.fleet, [replace(spare.session, name="new")])
        seconds, _ = _timed(lambda: plan(site.fleet, new, places))  # noqa: B023
        more.append((float(count * NODES), seconds))
        if count > 10:
            left = fleet.without_stamp(site.fleet, 0)
            free = iter(
                f"cs{at:03}.{number:02}" for at in range(1, count) for number in range(17, BOXES)
            )
            lost = [one for one in site.replicas if one.stamp == 0]
            moved = [
                fleet.moved_to(left, one, 0, [next(free) for _ in range(one.model.boxes)])
                for one in lost
            ]
            again = streams(left, [one.session for one in moved])
            names = {one.name for one in lost}
            rest = {one: node for one, node in places.items() if one.session not in names}
            # What stayed on nodes of the lost stamp, if anything, is gone as well.
            rest = {one: node for one, node in rest.items() if node in left.node}
            seconds, found = _timed(lambda: plan(left, again, rest))  # noqa: B023
            size = sum(one.memory_bytes for one in again)
            stamp = seconds, len(again), size
            again_unplaced = len(found.unplaced)
    return Planned(
        Curve("plan.whole", "nodes", tuple(whole)),
        Curve("plan.replica", "nodes", tuple(more)),
        stamp,
        unplaced,
        again_unplaced,
        crossing,
    )


def _timed(work: Callable[[], Plan]) -> tuple[float, Plan]:
    gc.collect()
    began = time.thread_time()
    found = work()
    return time.thread_time() - began, found


# A decision


def decisions(counts: Sequence[int], requests: int) -> tuple[Curve, Curve]:
    """To choose among so many replicas of one model, and to learn from the first token."""
    choose, learn = [], []
    for count in counts:
        progress(f"decisions among {count:,} replicas")
        seconds = _decide(count, requests)
        choose.append((float(count), seconds[0]))
        learn.append((float(count), seconds[1]))
    return Curve("brain.decide", "replicas", tuple(choose)), Curve(
        "brain.learn", "replicas", tuple(learn)
    )


def _decide(count: int, requests: int) -> tuple[float, float]:
    """Prompts of the trace's lengths, each known at one replica, and their beginnings at all. Other
    brains have something at every replica; of this one 25 wait, and 250 run."""
    clock = [1.0]
    names = [f"r{number:04}" for number in range(count)]
    maps = CacheMaps(lambda: clock[0] + WALL, rows_max=1 << 22)
    brain = Brain(0, maps, desired({MEDIUM.name: names}, 1), lambda: clock[0], 1)
    maker = traffic.makers(spec_of(MEDIUM.name).namespace(), 1)[0]
    rng = np.random.default_rng(1)
    tokens = traffic.drawn(traffic.FIRST, requests, rng)
    asked = [
        Ask(number, 0.0, 1, 0, number, number % 4, int(one), 300)
        for number, one in enumerate(tokens.tolist())
    ]
    heads = [traffic.chunk_ends(one)[: one.head + 1] for one in asked[:4]]
    shared = [key for keys in heads for key in keys]
    for at, name in enumerate(names):
        known = [key for one in asked[at::count] for key in traffic.chunk_ends(one)]
        mirror = maps.mirror(name)
        assert mirror
        filler = rng.bytes(NAME_BYTES * max(0, ENTRIES - len(known)))
        every = b"".join(dict.fromkeys(key[:NAME_BYTES] for key in (*shared, *known))) + filler
        for raw in snapshot(maker.tag + maker.namespace.digest()[:SPACE_BYTES], every):
            mirror.read(raw, 0.0)
    brain.exchange.elsewhere = {
        (MEDIUM.name, name): Load(4_000.0 * (at % 5), 20, at % 5, 1e6) for at, name in enumerate(names)
    }
    keys = [traffic.columns(one) for one in asked]
    chance, decided, learned = random.Random(1), 0.0, 0.0
    for at, one in enumerate(asked):
        clock[0] += 1 / 500
        began = time.thread_time()
        brain.choose(one, MEDIUM.name, maker, keys[at])
        decided += time.thread_time() - began
        if at >= 25:
            before = asked[at - 25]
            began = time.thread_time()
            brain.first_token(before.number, MEDIUM.name, chance.choice((512, before.tokens // 2)))
            learned += time.thread_time() - began
        if at >= 275:
            brain.end(asked[at - 275].number, MEDIUM.name)
    return decided / requests, learned / max(1, requests - 25)


def snapshot(space: bytes, names: bytes) -> Iterator[bytes]:
    """A whole map of one org with these names."""
    count = len(names) // NAME_BYTES
    values = pack_values([entry(WALL + 86_400, 0)] * count, int(WALL))
    parts = in_parts([Section(space, PREFIX, names, values)])
    life = space[:8]
    for at, part in enumerate(parts):
        message = (1, life, at + 1, WALL, int(WALL), True, at, len(parts), count, False, tuple(part))
        yield Message(*message).encode()


# Maps in a brain


def updates(counts: Sequence[int]) -> Curve:
    """To take over a message with so many changes: half of them new entries, half removed ones."""
    maps = CacheMaps(lambda: WALL, rows_max=1 << 22)
    names = [f"r{number}" for number in range(8)]
    maps.follow({name: DriverPlace(f"driver:{name}", spec_of("m")) for name in names})
    spaces = [number.to_bytes(16, "little") + bytes(SPACE_BYTES) for number in range(SPACES)]
    rng = np.random.default_rng(1)
    state: dict[str, tuple[int, list[bytes]]] = {}
    for name in names:
        mirror = maps.mirror(name)
        assert mirror
        for raw in snapshot(spaces[0], rng.bytes(NAME_BYTES * 10_000)):
            mirror.read(raw, 0.0)
        state[name] = 2, [b""] * SPACES

    def message(name: str, changes: int) -> bytes:
        sequence, before = state[name]
        orgs = min(SPACES, max(1, changes // 8))
        each = max(1, changes // 2 // orgs)
        sections, after = [], list(before)
        for org in range(orgs):
            after[org] = rng.bytes(NAME_BYTES * each)
            values = pack_values([entry(WALL + 86_400, 0)] * each, int(WALL))
            removed = before[org][: NAME_BYTES * each]
            sections.append(Section(spaces[org], PREFIX, after[org], values, removed))
        state[name] = sequence + 1, after
        life = spaces[0][:8]
        return Message(
            1, life, sequence, WALL, int(WALL), True, 0, 0, 0, False, tuple(sections)
        ).encode()

    def cost(changes: int) -> float:
        for name in names:  # so that what is removed is as much as what is added
            mirror = maps.mirror(name)
            assert mirror
            mirror.read(message(name, changes), 0.0)
        took, rounds = 0.0, max(2, 20_000 // changes // len(names))
        for _ in range(rounds):
            for name in names:
                raw, mirror = message(name, changes), maps.mirror(name)
                assert mirror
                began = time.thread_time()
                assert mirror.read(raw, 0.0)
                took += time.thread_time() - began
                assert mirror.is_known
        return took / rounds / len(names)

    return curve("brain.map.message", "changes", counts, cost)


@dataclass(frozen=True, slots=True)
class Memory:
    drivers: int
    wanted: int  # entries
    rows: int
    refused: int
    bytes: int
    seconds: float


def memory(drivers: int, entries: int, rows_max: int = ROWS_MAX) -> Memory:
    """Maps of so many drivers with so many entries each in one brain, as far as there is room."""
    maps = CacheMaps(lambda: WALL, rows_max)
    names = [f"r{number}" for number in range(drivers)]
    maps.follow({name: DriverPlace(f"driver:{name}", spec_of("m")) for name in names})
    rng, took = np.random.default_rng(1), 0.0
    space, left_out, done = bytes(16 + SPACE_BYTES), 0, 0
    for name in names:
        mirror = maps.mirror(name)
        assert mirror
        for raw in snapshot(space, rng.bytes(NAME_BYTES * entries)):
            began = time.thread_time()
            mirror.read(raw, 0.0)
            took += time.thread_time() - began
        done += 1
        left_out += mirror.counts.left_out
        if left_out > entries:
            break  # it is full: the others would be refused as a whole
    wanted = drivers * entries
    held = done * entries - left_out
    return Memory(drivers, wanted, maps.table.rows, wanted - held, maps.table.bytes, took)


# Between brains


def exchanges(counts: Sequence[int]) -> tuple[Curve, int]:
    """To take over what so many other brains report, and the bytes of one report."""
    clock = [1.0]
    names = [f"r{number:04}" for number in range(1_000)]
    told = desired({MEDIUM.name: names}, 1)
    brain = Brain(0, CacheMaps(lambda: WALL, 1 << 12), told, lambda: clock[0], 1)
    other = Brain(1, CacheMaps(lambda: WALL, 1 << 12), told, lambda: clock[0], 1)
    maker = traffic.makers(spec_of(MEDIUM.name).namespace(), 1)[0]
    number = 0
    while len(other.router.flights[MEDIUM.name].loads(clock[0])) < LOADS and number < 8 * LOADS:
        one = Ask(number, 0.0, 1, 0, number, 0, 6_000, 300)
        other.choose(one, MEDIUM.name, maker, traffic.columns(one))
        number += 1
    report = other.report()

    def cost(count: int) -> float:
        reports, rounds = [report] * count, max(2, 40 // count)
        began = time.thread_time()
        for _ in range(rounds):
            brain.hear(reports)
        return (time.thread_time() - began) / rounds

    return curve("brain.exchange", "brains", counts, cost), len(report)


# In a driver


@dataclass(frozen=True, slots=True)
class Ledgers:
    store: Curve  # of a request, by orgs
    messages: float  # seconds of a request
    real: Compared
    model: Compared


def ledgers(orgs: Sequence[int], requests: int, columns: int) -> Ledgers:
    """A driver's ledger that is full, for a request of so many orgs; and the model of it, by the same
    requests of all orgs."""
    every = [one for one in traffic.asks(1, 1.0, 1) if MODELS[one.model] is MEDIUM]
    some = [one for one in every if one.conversation // len(MODELS) % 10 == 0][:requests]
    points, real = [], Compared()
    for count in orgs:
        progress(f"a ledger of {count:,} orgs")
        makers = traffic.makers(spec_of(MEDIUM.name).namespace(), count)
        asked = [replace(one, org=one.org % count) for one in some]
        real = of_ledger(asked, makers, columns)
        points.append((float(count), real.cpu / len(asked)))
    model = of_model(asked, makers, columns)
    store = Curve("driver.request", "orgs", tuple(points))
    return Ledgers(store, real.cpu_messages / len(some), real, model)
