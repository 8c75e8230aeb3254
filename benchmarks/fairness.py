"""Who gets what when all ask for more than there is: the brain's real queues before simulated replicas.

Two brains, ten orgs, eight replicas, in a time of their own (`benchmarks/fair_world.py`). Against it,
the same requests sent on at once, to replicas that serve first come, first served. Means of two seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.fair_world import Org, World, jain
from benchmarks.harness import Row, options, percentile, progress, show

ORGS: Final = 10
GREEDY: Final = "greedy"
SMALL: Final = "small-0"
WARM_SECONDS: Final = {"prefill": 20.0, "decode": 50.0}  # answers of a sort take 10 s
# Tokens of a prompt and of an answer: what bounds the replicas
KINDS: Final = {"prefill": (1500.0, 120.0), "decode": (300.0, 400.0)}
LOADS: Final = (0.8, 1.0, 1.5, 2.0, 3.0)
QUICK_LOADS: Final = (1.0, 2.0)
GOOD_SECONDS: Final = 5.0  # until the first token; later it is of no use


@dataclass(frozen=True)
class Scene:
    kind: str
    seconds: float
    seeds: int
    loads: Sequence[float] = LOADS

    @property
    def warm(self) -> float:
        return WARM_SECONDS[self.kind]

    def org(self, name: str, of_share: float) -> Org:
        """One that asks for so much of a tenth of what the replicas can do."""
        prompts, answers = KINDS[self.kind]
        org = Org(name, 1.0, prompts, answers)
        return replace(org, rate=of_share * self.capacity / ORGS / org.cost)

    @property
    def capacity(self) -> float:
        prompts, answers = KINDS[self.kind]
        return World([Org("any", 1.0, prompts, answers)]).capacity

    def worlds(self, orgs: Sequence[Org], *, is_fair: bool = True) -> Iterator[World]:
        for seed in range(self.seeds):
            world = World(orgs, seed=seed, warm=self.warm, is_fair=is_fair)
            yield world.run(self.warm + self.seconds)

    def mean(self, orgs: Sequence[Org], of: Callable[[World], float], *, is_fair: bool = True) -> float:
        return statistics.mean(of(world) for world in self.worlds(orgs, is_fair=is_fair))


def equal(world: World) -> float:
    return jain([one.cost for one in world.served.values()])


def p99_of_small(world: World) -> float:
    waits = [wait for name, one in world.served.items() if name != GREEDY for wait in one.waits]
    return percentile(waits, 0.99)


def good(world: World) -> float:
    """Requests in a second whose first token came in time."""
    return sum(one.good for one in world.served.values()) / (world.now - world.warm)


def jain_rows(scene: Scene) -> Iterator[Row]:
    """Nine orgs ask for their share, one for ten times its share."""
    others = [scene.org(f"small-{number}", 1.0) for number in range(ORGS - 1)]
    split = {
        "": [*others, scene.org(GREEDY, 10.0)],
        ".one_brain": [
            *(replace(one, chances=(0, 1)) for one in others),
            replace(scene.org(GREEDY, 10.0), chances=(1, 0)),
        ],
    }
    first_come = scene.mean(split[""], equal, is_fair=False)
    for which, orgs in split.items():
        value = scene.mean(orgs, equal)
        against = f"sent on at once: {first_come:.2f}"
        yield Row(f"fair.jain.{scene.kind}{which}", value, "of 1", against, value / 0.95, 1.0)


def p99_rows(scene: Scene) -> Iterator[Row]:
    """Nine orgs ask for half their share, one for ten times its share; and one of the nine alone."""
    others = [scene.org(f"small-{number}", 0.5) for number in range(ORGS - 1)]
    alone = replace(scene, seconds=3 * scene.seconds).mean(others[:1], p99_of_small)
    orgs = [*others, scene.org(GREEDY, 10.0)]
    first_come = scene.mean(orgs, p99_of_small, is_fair=False)
    value = scene.mean(orgs, p99_of_small)
    against = f"alone: {alone:.2f} s; sent on at once: {first_come:.1f} s"
    yield Row(f"fair.small_org.p99.{scene.kind}", value, "s", against, 1.3 * alone / value, 1.0)


def goodput_rows(scene: Scene) -> Iterator[Row]:
    """Ten equal orgs at rising loads, whose requests have a deadline."""

    def at(load: float, *, is_fair: bool = True) -> float:
        orgs = [
            replace(
                scene.org(f"small-{number}", load), wait_seconds=GOOD_SECONDS, good_seconds=GOOD_SECONDS
            )
            for number in range(ORGS)
        ]
        return scene.mean(orgs, good, is_fair=is_fair)

    by_load = {load: at(load) for load in scene.loads}
    best = max(by_load.values())
    first_come = at(2.0, is_fair=False)
    more = {f"at load {load:g}": value for load, value in by_load.items()}
    against = f"best of all loads: {best:.1f}; sent on at once: {first_come:.1f}"
    value = by_load[2.0]
    name = f"overload.goodput.{scene.kind}"
    yield Row(name, value, "requests/s", against, value / best, 0.9, more)


def main() -> None:
    asked = options(__doc__)
    seconds, seeds, loads = (40.0, 1, QUICK_LOADS) if asked.quick else (80.0, 2, LOADS)
    rows: list[Row] = []
    for kind in KINDS:
        scene = Scene(kind, seconds, seeds, loads)
        for part in (jain_rows, p99_rows, goodput_rows):
            progress(f"{kind}: {part.__name__}")
            rows += part(scene)
    show("Fairness and overload", rows, asked.json)


if __name__ == "__main__":
    main()
