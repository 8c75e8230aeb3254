"""How long placement takes, how near it is to the optimum, what unequal shards make of memory.

1,000 nodes with two NICs each and 256 boxes in 16 stamps of four leaves; 64 sessions of 4 boxes, with
four cache groups on each of four domains: 4,096 streams. Three fleets: with room (grants of 75 % of the
fair share), tight (90 %), and scarce (a quarter of the stamps has a third less nodes than boxes want, so
that streams have to cross the spine).

`gap.optimum` is the WIO that crosses the spine above the least that an exact program proves possible,
as a share of all WIO; `gap.even` by how much the mean square of loads is above that of perfectly even
stamps, which whole streams don't reach.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from benchmarks.harness import Row, limited, options, progress, show
from benchmarks.sessions import session_rows
from console.placement.grants import Job, Session, Shard, Stream, effective, spread, streams
from console.placement.loads import FILL
from console.placement.plan import Cost, Plan
from console.placement.planner import plan
from console.placement.rails import restore_rails
from console.placement.rules import Rules
from console.placement.topology import Box, Domain, Fleet, Nic, Node, State, Tier

STAMPS: Final = 16
BOXES, BOXES_PER_SESSION = 256, 4
NODES, SHARDS_MAX, MEMORY_BYTES = 1_000, 6, 1 << 40
WIO: Final = ((8, 8, 8, 8), (9, 8, 8, 7), (10, 8, 7, 7))  # of the four domains of a box
GROUPS: Final = ((40, 40, 40, 40), (64, 48, 32, 16), (50, 50, 30, 30))  # of a model, KiB per token
SKEWS: Final = ((1, 1, 1, 1), (9, 8, 8, 7), (5, 4, 4, 3), (2, 1, 1, 1), (5, 3, 2, 2), (3, 1, 1, 1))
CLAIMED: Final = (5, 3, 2, 2)  # where an equal split loses the 40 % of the notes
EXACT_SECONDS, EXACT_SECONDS_QUICK = 30, 5  # for a stamp; what is not proven then counts by its bound

Found = TypeVar("Found")


@dataclass(frozen=True)
class World:
    fleet: Fleet
    sessions: tuple[Session, ...]

    def streams(self) -> tuple[Stream, ...]:
        return streams(self.fleet, self.sessions)


def world(grant_percent: int, *, scarce: bool = False, seed: int = 1) -> World:
    rng = random.Random(seed)
    nodes = tuple(_node(number, _stamp_of(number, scarce=scarce)) for number in range(NODES))
    boxes = tuple(
        Box(
            f"cs{number:03}",
            tuple(
                Domain((_leaf(number % STAMPS, place),), wio)
                for place, wio in enumerate(rng.choice(WIO))
            ),
        )
        for number in range(BOXES)
    )
    fleet = Fleet(nodes, boxes)
    rules = Rules(grant_percent=grant_percent)
    return World(
        fleet,
        tuple(
            _session(fleet, number, rng.choice(GROUPS), rules)
            for number in range(BOXES // BOXES_PER_SESSION)
        ),
    )


def _stamp_of(node: int, *, scarce: bool) -> int:
    """Evenly; or a quarter of the stamps has a third less, and the others share it."""
    short = STAMPS // 4
    if scarce and node % STAMPS < short and node // STAMPS % 3 == 0:
        return short + node // STAMPS % (STAMPS - short)
    return node % STAMPS


def _leaf(stamp: int, place: int) -> str:
    return f"leaf{stamp:02}.{place % 4}"


def _node(number: int, stamp: int) -> Node:
    place = number // STAMPS
    nics = (Nic(_leaf(stamp, place)), Nic(_leaf(stamp, place + 1)))
    return Node(f"ax{number:04}", nics, MEMORY_BYTES, SHARDS_MAX)


def _session(fleet: Fleet, number: int, groups: Sequence[int], rules: Rules) -> Session:
    """On boxes of one stamp, as a scheduler of jobs would choose them."""
    stamp, turn = number % STAMPS, number // STAMPS
    boxes = [
        f"cs{stamp + STAMPS * (BOXES_PER_SESSION * turn + place):03}"
        for place in range(BOXES_PER_SESSION)
    ]
    shards = [
        shard
        for group, kibibytes in zip("abcd", groups, strict=True)
        for shard in spread(fleet, boxes, group, kibibytes << 10)
    ]
    return Session(f"s{number:02}", (Job(f"j{number:02}", tuple(shards)),), rules)


def timed(work: Callable[[], Found], times: int) -> tuple[Found, float, dict[str, float]]:
    """What it gives, the median of the seconds that it took, and others in ms: CPU, best, worst."""
    seconds, busy = [], []
    for _ in range(times):
        gc.collect()
        began, at_first = time.perf_counter(), time.process_time()
        found = work()
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - at_first)
    more = {"CPU ms": statistics.median(busy), "best ms": min(seconds), "worst ms": max(seconds)}
    return found, statistics.median(seconds), {name: 1e3 * value for name, value in more.items()}


def places_of(found: Plan) -> dict[Stream, str]:
    return {one.stream: one.node for one in found.placed}


def _not_on_rails(cost: Cost) -> dict[str, float]:
    return {"unplaced WIO": cost.unplaced_wio, "spine WIO": cost.spine_wio, "leaf WIO": cost.leaf_wio}


def plan_rows(worlds: Mapping[str, World], times: int) -> tuple[list[Row], dict[str, Plan]]:
    rows, plans = [], {}
    for name, one in worlds.items():
        plans[name], seconds, more = timed(partial(_plan_all, one), times)
        more |= _not_on_rails(plans[name].cost)
        rows.append(limited(f"plan.4096{name}", seconds, "s", 1.0, more))
    return rows, plans


def _plan_all(one: World) -> Plan:
    return plan(one.fleet, one.streams())


def one_more_rows(worlds: Mapping[str, World], times: int) -> list[Row]:
    rows = []
    for name, one in worlds.items():
        new = one.sessions[-STAMPS]  # of the first stamp, where `scarce` is
        others = [session for session in one.sessions if session != new]
        running = places_of(plan(one.fleet, streams(one.fleet, others)))
        found, seconds, more = timed(partial(_plan_one_more, one.fleet, new, running), times)
        more |= _not_on_rails(found.cost)
        rows.append(limited(f"session.one_more{name}", 1e3 * seconds, "ms", 100.0, more))
    return rows


def _plan_one_more(fleet: Fleet, session: Session, running: Mapping[Stream, str]) -> Plan:
    return plan(fleet, streams(fleet, [session]), running)


def gap_rows(
    worlds: Mapping[str, World], plans: Mapping[str, Plan], stamps: Sequence[int], seconds: float
) -> list[Row]:
    rows = []
    for name, one in worlds.items():
        found = plans[name]
        total = sum(_wio(one, stamp, one.streams()) for stamp in stamps)
        gone = [
            *(each.stream for each in found.unplaced),
            *(each.stream for each in found.placed if each.tier is Tier.SPINE),
        ]
        ours = sum(_wio(one, stamp, gone) for stamp in stamps)
        answers = [least_spine_wio(one, stamp, seconds) for stamp in stamps]
        least = sum(bound for bound, _ in answers)
        gap = abs(100 * (ours - least) / total)  # a bound is below, but for its last digits
        more: dict[str, float] = {
            "spine WIO": ours,
            "least": least,
            "stamps": len(stamps),
            "proven": sum(is_proven for _, is_proven in answers),
        }
        rows.append(Row(f"gap.optimum{name}", gap, "%", "1 %", _below(gap, 1.0), 1.0, more))
        if not gone:
            even = 100 * (found.cost.load / perfectly_even(one) - 1)
            rows.append(Row(f"gap.even{name}", even, "%", "1 %", _below(even, 1.0), 1.0))
    return rows


def _below(value: float, limit: float) -> float:
    """The limit over the value, and no more than a hundred: at zero there is nothing to divide by."""
    return limit / max(value, limit / 100)


def _wio(one: World, stamp: int, wanted: Iterable[Stream]) -> int:
    return sum(stream.wio for stream in wanted if _is_in(one.fleet.box[stream.box].leaves, stamp))


def _is_in(leaves: Iterable[str], stamp: int) -> bool:
    return all(leaf.startswith(f"leaf{stamp:02}.") for leaf in leaves)


def least_spine_wio(one: World, stamp: int, seconds: float) -> tuple[float, bool]:
    """The least WIO of a stamp's streams that can't stay in it, by an exact program; else its bound.

    Streams of one size, WIO and leaf are alike, so the program counts how many of each go to each node.
    """
    kinds: dict[tuple[int, int], int] = defaultdict(int)
    for stream in one.streams():
        if _is_in(one.fleet.box[stream.box].leaves, stamp):
            kinds[stream.memory_bytes, stream.wio] += 1
    nodes = [node for node in one.fleet.nodes if _is_in(node.leaves, stamp)]
    count, size = len(kinds), len(nodes)
    rows: list[tuple[int, int, float]] = []
    for kind, (memory, _) in enumerate(kinds):
        for place in range(size):
            column = kind * size + place
            rows.append((kind, column, 1))
            rows.append((count + 2 * place, column, memory / MEMORY_BYTES))
            rows.append((count + 2 * place + 1, column, 1))
    at, columns, values = zip(*rows, strict=True)
    upper = [*kinds.values(), *([1, SHARDS_MAX] * size)]
    wio = np.repeat([float(wio) for _, wio in kinds], size)
    done = milp(
        -wio,
        integrality=np.ones(len(wio)),
        bounds=Bounds(0, np.repeat([float(most) for most in kinds.values()], size)),
        constraints=LinearConstraint(csr_array((values, (at, columns))), -np.inf, upper),
        options={"time_limit": seconds, "mip_rel_gap": 0},
    )
    total = sum(wio * most for (_, wio), most in kinds.items())
    return total + float(done.mip_dual_bound), done.status == 0


def perfectly_even(one: World) -> float:
    """The mean square of loads if all nodes of a stamp had the same, and no stream left its stamp.

    Memory is counted in the parts of a node that costs count, of which each stream takes whole ones.
    """
    total_wio, total_bytes = sum(node.wio for node in one.fleet.nodes), one.fleet.memory_bytes
    found = 0.0
    for stamp in range(STAMPS):
        nodes = [node for node in one.fleet.nodes if _is_in(node.leaves, stamp)]
        wanted = [each for each in one.streams() if _is_in(one.fleet.box[each.box].leaves, stamp)]
        found += sum(each.wio for each in wanted) ** 2 / sum(node.wio for node in nodes) / total_wio
        parts = sum(-(-FILL * each.memory_bytes // MEMORY_BYTES) for each in wanted)
        found += (
            (parts / FILL * MEMORY_BYTES) ** 2 / sum(node.memory_bytes for node in nodes) / total_bytes
        )
    return found


def restore_rails_rows(one: World, times: int) -> list[Row]:
    """A twentieth of the nodes was cordoned when streams were placed, and is back."""
    away = tuple(
        replace(node, state=State.CORDONED if number % 20 == 0 else State.READY)
        for number, node in enumerate(one.fleet.nodes)
    )
    running = places_of(plan(replace(one.fleet, nodes=away), one.streams()))
    found, seconds, more = timed(partial(restore_rails, one.fleet, running), times)
    more |= _not_on_rails(found.before)
    more |= {f"{name} then": value for name, value in _not_on_rails(found.after).items()}
    return [Row("restore_rails.4096", seconds, "s", more={**more, "moves": len(found.moves)})]


def effective_rows() -> list[Row]:
    """A job on one box with domains so unequal, and a node's memory."""
    rows = []
    for skew in SKEWS:
        shards = tuple(Shard("full", "cs0", place, part << 14) for place, part in enumerate(skew))
        found = effective(Job("job", shards), MEMORY_BYTES)
        name = ":".join(map(str, skew))
        is_claim = skew == CLAIMED
        rows.append(
            Row(
                "effective.proportional_vs_equal" if is_claim else f"effective.{name}",
                found.lost_percent,
                "% lost",
                f"equal, {name}",
                found.tokens / found.tokens_equal,
                1.65 if is_claim else None,  # 40 % lost is 1.67 times as much kept
                {"tokens": found.tokens, "tokens if equal": found.tokens_equal},
            )
        )
    return rows


def main() -> None:
    chosen = options(__doc__)
    times, stamps = (3, range(0, STAMPS, 5)) if chosen.quick else (15, range(STAMPS))
    seconds = EXACT_SECONDS_QUICK if chosen.quick else EXACT_SECONDS
    worlds = {"": world(75), ".tight": world(90), ".scarce": world(75, scarce=True)}
    progress("plans of 4,096 streams")
    rows, plans = plan_rows(worlds, times)
    progress("one more session")
    rows += one_more_rows(worlds, times)
    progress("moves off the spine")
    rows += restore_rails_rows(worlds[".tight"], 3)
    progress("distance to the optimum, by exact programs")
    rows += gap_rows(worlds, plans, stamps, seconds)
    rows += effective_rows()
    progress("a resize under load, and the API")
    of_sessions, drawn = session_rows(quick=chosen.quick)
    show("Placement", rows + of_sessions, chosen.json)
    print(f"\nHit rate over the story of a resize\n\n{drawn}")


if __name__ == "__main__":
    main()
