"""A fleet at internet scale, by simulation: 10,000 nodes, 2,500 boxes, 1,000 replicas and 100,000
requests a second.

    make bench NAME=scale
    make bench NAME=scale ARGS=--quick

The planner, the brain's decision, its cache maps and their messages, and what brains tell each other are
the real code. Engines, links and clients are modelled, and so is what a replica's ledger keeps; the last
is compared with a real ledger in the same run. Costs are processor time, and are fitted by size; the
planner, the decision and the maps' memory are run at full size. What users notice is simulated in
virtual time with some stamps of the fleet, each as busy as it would be. A leaf is lost, and later a
stamp, but not with `--quick`. In the end, what each part has to do at full size is compared with what
it can.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterable
from typing import Final

from benchmarks.harness import Row, options, progress, show
from benchmarks.scale import costs, limits
from benchmarks.scale.costs import Curve
from benchmarks.scale.fleet import columns_bytes, leaf_of, site
from benchmarks.scale.limits import Measured
from benchmarks.scale.sizes import FULL, GBIT, NIC_GBITS, NODES, WARM
from benchmarks.scale.world import (
    NOTICED_SECONDS,
    REPLACED_SECONDS,
    Lost,
    Second,
    World,
    times,
)
from swdriver_shim.cache_map.codec import CHUNK

LOSS_STAMPS: Final = 4
LOSS_SHARE: Final = 0.25  # of requests, engines, caches and links, where something is lost
STEADY: Final = 10.0  # seconds of virtual time that are measured before anything is lost
SETTLE: Final = 2.0  # seconds before that, in which brains learn rates
QUICK_STEADY: Final = 4.0
AFTER_LEAF: Final = REPLACED_SECONDS + 8.0
AFTER_STAMP: Final = 20.0


def curve_row(one: Curve, scale: float = 1e6, unit: str = "µs") -> Row:
    more = {f"{size:,.0f} {one.size}": scale * seconds for size, seconds in one.points[:-1]}
    if len(one.points) < 3:
        return Row(
            one.name, scale * one.last, unit, f"at {one.points[-1][0]:,.0f} {one.size}", more=more
        )
    _, power, error = one.fit()
    against = f"at {one.points[-1][0]:,.0f} {one.size}; n^{power:.2f} ± {error:.2f}"
    return Row(one.name, scale * one.last, unit, against, more=more)


class Story:
    """Some stamps of the fleet: steady, and then what is lost of them."""

    def __init__(self, stamps: int, share: float = 1.0, *, loses: bool = False, quick: bool) -> None:
        self.steady = QUICK_STEADY if quick else STEADY
        self.loses = loses
        more = AFTER_LEAF + AFTER_STAMP if loses else 0.0
        progress(f"filling the caches of {stamps} stamps")
        self.world = World(stamps, SETTLE + self.steady + more, share=share)
        self.world.warm()

    def play(self) -> tuple[list[Row], dict[str, float]]:
        """The rows; and of steady times what a stamp's maps and links have to do."""
        world, seconds = self.world, SETTLE + self.steady
        progress(f"{seconds:g} s of {world.stamps} stamps")
        world.run(WARM + seconds)
        before = world.between(WARM + SETTLE, WARM + seconds)
        rows = [] if self.loses else steady_rows(world, before, seconds)
        facts = {
            "changes": world.entries_changed / seconds / world.stamps,
            "bytes": world.message_bytes / seconds / world.stamps,
            **world.busiest(seconds),
            "update": world.cpu["map updates"] / seconds / world.stamps,
            "prefill": max(one.engine.prompt_seconds for one in world.replicas) / seconds,
        }
        if self.loses:
            rows += leaf_rows(world, before)
            rows += stamp_rows(world, before)
        world.finish()
        asked = [one.number for one in world.asks if one.at >= WARM]
        assert all(world.finished[number] == 1 for number in asked)
        return rows, facts


def steady_rows(world: World, steady: Second, seconds: float) -> list[Row]:
    mean, p50, p95 = times(steady)
    replicas = f"{len(world.replicas)} replicas"
    name = f"steady.{len(world.replicas)}"
    requests = world.counts["requests"]
    cpu = {f"{part}, µs": 1e6 * world.cpu[part] / requests for part in world.cpu if part != "plan"}
    moved = world.inward.totals()[0] + world.outward.totals()[0]
    return [
        Row(f"{name}.hit_rate", 100 * steady.hit_rate, "% of tokens", replicas),
        Row(f"{name}.ttft.p50", 1e3 * p50, "ms", replicas),
        Row(f"{name}.ttft.p95", 1e3 * p95, "ms", replicas),
        Row(f"{name}.ttft.mean", 1e3 * mean, "ms", replicas),
        Row(f"{name}.spine", 100 * world.crossing(), "% of bytes", replicas),
        Row(f"{name}.bytes", moved / seconds / len(world.replicas) / 1e9, "GB/s a replica", replicas),
        Row(f"{name}.request", sum(cpu.values()), "µs of the simulation", replicas, more=cpu),
    ]


def leaf_rows(world: World, before: Second) -> list[Row]:
    leaf, lost_at = leaf_of(0, 0), world.now
    progress("a leaf is lost")
    cut = world.lose_leaf(leaf)
    world.run(lost_at + REPLACED_SECONDS)
    found = world.replan_leaf(leaf, cut)
    until = lost_at + AFTER_LEAF
    world.run(until)
    hit, ttft = world.back_after(lost_at, before, until)
    lowest = world.between(lost_at + 2, lost_at + REPLACED_SECONDS)
    return [
        Row("leaf.cut", found.replicas, f"of {len(world.replicas)} replicas"),
        Row(
            "leaf.hit_rate.meanwhile",
            100 * lowest.hit_rate,
            "% of tokens",
            f"{100 * before.hit_rate:.1f} before",
        ),
        _slower("leaf.ttft.meanwhile", lowest, before),
        _back("leaf.hit_rate.back", hit, AFTER_LEAF),
        _back("leaf.ttft.back", ttft, AFTER_LEAF),
        *_placed_rows(found),
    ]


def _back(name: str, seconds: float, watched: float) -> Row:
    if math.isnan(seconds):
        return Row(name, watched, "s were watched: not back to 90 %")
    return Row(name, seconds, "s, to 90 %")


def _slower(name: str, one: Second, before: Second) -> Row:
    mean, _, p95 = (now / then for now, then in zip(times(one), times(before), strict=True))
    return Row(name, mean, "times as long", f"p95: {p95:.2f}")


def _placed_rows(found: Lost) -> list[Row]:
    return [
        Row("leaf.plan", 1e3 * found.plan_cpu, "ms", f"{found.streams} streams, {found.kept} stay"),
        Row("leaf.off_rails", 100 * found.off_rails, "% of bytes", "over another port of the box"),
        Row("leaf.rails.moves", found.rail_moves, "streams", "restore-rails, afterwards"),
        Row("leaf.rails.bytes", found.rail_bytes / 1e12, "TB, at most", "restore-rails"),
        Row("leaf.rails.off", 100 * found.off_rails_restored, "% of WIO", "after restore-rails"),
    ]


def stamp_rows(world: World, before: Second) -> list[Row]:
    lost_at = world.now
    progress("a stamp is lost")
    gone = world.lose_stamp(world.stamps - 1)
    lost = [world.replicas[number] for number in gone]
    columns = [one.cache.size * CHUNK for one in lost]
    size = sum(columns_bytes(one.model, count) for one, count in zip(lost, columns, strict=True))
    world.run(lost_at + NOTICED_SECONDS)
    again = world.counts["sent again"]
    world.notice(gone)
    until = lost_at + AFTER_STAMP
    world.run(until)
    hit, ttft = world.back_after(lost_at, before, until)
    late = world.between(until - 3, until)
    replicas = f"of {len(world.replicas)} replicas, for good"
    return [
        Row("stamp.lost", len(gone), replicas, f"{sum(columns) / 1e6:.1f} million columns"),
        Row("stamp.lost.bytes", size / 1e12, "TB of columns"),
        Row("stamp.sent_again", world.counts["sent again"] - again, "requests"),
        _back("stamp.hit_rate.back", hit, AFTER_STAMP),
        _back("stamp.ttft.back", ttft, AFTER_STAMP),
        Row("stamp.hit_rate.then", 100 * late.hit_rate, "% of tokens"),
        _slower("stamp.ttft.then", late, before),
    ]


def planner_rows(planned: costs.Planned) -> list[Row]:
    seconds, count, size = planned.stamp
    spread = size / (8 * NODES * NIC_GBITS * GBIT)
    return [
        curve_row(planned.whole, 1e3, "ms"),
        curve_row(planned.one_more, 1e3, "ms"),
        Row("plan.lost_stamp", 1e3 * seconds, "ms", f"{count} streams on {NODES * FULL:,} nodes"),
        Row("plan.lost_stamp.bytes", size / 1e12, "TB granted anew", more={"ms to fill": 1e3 * spread}),
        Row("plan.lost_stamp.unplaced", planned.unplaced_of_stamp, "streams", f"of {count}"),
        Row("plan.unplaced", planned.unplaced, "streams"),
        Row("plan.spine", 100 * planned.crossing, "% of WIO"),
    ]


def ledger_rows(found: costs.Ledgers) -> list[Row]:
    real, model = found.real, found.model
    return [
        curve_row(found.store),
        Row("driver.messages", 1e6 * found.messages, "µs a request"),
        Row("model.hit_rate", 100 * model.hit_rate, "% of tokens", f"real: {100 * real.hit_rate:.2f} %"),
        Row("model.entries", model.entries, "in the map", f"real: {real.entries:,}"),
        Row("model.message_bytes", model.bytes / 1e6, "MB", f"real: {real.bytes / 1e6:.2f} MB"),
    ]


def memory_rows(found: costs.Memory) -> list[Row]:
    held = found.wanted - found.refused
    return [
        Row("brain.map.bytes", found.bytes / 1e9, "GB", f"{held / 1e6:.1f} million entries"),
        Row("brain.map.refused", 100 * found.refused / found.wanted, "% of entries", "full size"),
        Row("brain.map.entry", 1e6 * found.seconds / held, "µs", "from snapshots"),
    ]


def part_rows(found: Iterable[limits.Part]) -> list[Row]:
    rows = []
    for one in found:
        against = f"{one.what}; {one.helps} help" if one.helps else one.what
        ratio = 1 / one.load if one.load else 100.0
        rows.append(Row(f"full.{one.name}", one.load, "times", against, min(100.0, ratio), 1.0))
    return rows


def main() -> None:
    given = options(__doc__)
    quick: bool = given.quick
    gc.disable()  # nothing here makes cycles that matter, and looking for some is no cost of a part
    planned = costs.planner((1, 5, 25, FULL))
    sizes_ = (10, 40, 200, 1_000)
    decide, learn = costs.decisions(sizes_, 300 if quick else 1_000)
    update = costs.updates((16, 64, 256, 1_024, 4_096))
    exchange, report_bytes = costs.exchanges((4, 16, 64, 256))
    orgs = (1, 10, 100, 1_000)
    ledgers = costs.ledgers(orgs, 500 if quick else 1_500, 20_000 if quick else 40_000)
    columns = statistics.mean(one.columns for one in site(1).replicas)
    progress("the maps of all replicas in one brain")
    memory = costs.memory(sizes_[-1], int(columns) // CHUNK)
    rows = [
        *planner_rows(planned), curve_row(decide), curve_row(learn), curve_row(update),
        curve_row(exchange), Row("brain.exchange.report", report_bytes, "bytes"),
        *ledger_rows(ledgers), *memory_rows(memory),
    ]  # fmt: skip
    facts: dict[str, float] = {}
    for stamps in (1,) if quick else (1, 2):
        found, facts = Story(stamps, quick=quick).play()
        rows += found
    if not quick:
        found, _ = Story(LOSS_STAMPS, LOSS_SHARE, loses=True, quick=False).play()
        rows += found
    measured = Measured(
        decide, learn, exchange, report_bytes, facts["update"], memory, planned, ledgers,
        facts["bytes"], facts, facts["prefill"],
    )  # fmt: skip
    found_parts = limits.parts(measured)
    of_brains = limits.brains(measured)
    rows.append(
        Row(
            "full.brains", of_brains.count, "brains", f"each {of_brains.load:.2f} of a processor",
            more={"changes/s": facts["changes"] * FULL, "map MB/s": facts["bytes"] * FULL / 1e6},
        )
    )  # fmt: skip
    show("Scale", rows + part_rows(found_parts), given.json)
    print(f"\n{limits.sentence(found_parts)}")


if __name__ == "__main__":
    main()
