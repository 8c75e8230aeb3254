"""Judges of what is not heard: an agent, a leaf with all its agents, the numbers themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from console.alerts.life import Verdict
from console.alerts.rules import Finding, Judge, Limit, LimitsOf, Tables, World, name_of
from telemetry.topics import FLEET
from telemetry.units import duration

SILENT = Limit("silent_seconds", 30, "From how long a silence on.", low=5, high=86_400)
SWITCH: Final = {"node": "KVSS_AGENT_TELEMETRY", "driver": "SWDRIVER_TELEMETRY"}  # turns numbers on


def is_silent(world: World, topic: str, seconds: float) -> bool:
    """Whether nobody was heard under this topic for so long, by the clock of the last who was.

    While nothing at all arrives, it is not the agents that are silent. Who has just joined has not had
    the time to say anything yet.
    """
    since, newest = world.heard.get(topic) or world.expected.get(topic), world.newest
    if newest is None:
        return False
    return since is None or (newest - since).total_seconds() > seconds


def numbers_late_seconds(world: World) -> float:
    """How long nothing at all was heard."""
    return _seconds(world.newest, world.at) if world.newest else 0.0


def silent(kind: str, *, registered_only: bool = False) -> Judge:
    """A breach for each of this kind that was heard once, or has joined, and is not heard now."""

    def judge(_tables: Tables, world: World, limits: LimitsOf) -> Iterator[Finding]:
        who = world.expected if registered_only else {*world.heard, *world.expected}
        topics = {one for one in who if one.startswith(f"{kind}:")}
        for topic in sorted(topics):
            threshold, heard = limits(topic)["silent_seconds"], world.heard.get(topic)
            breach = is_silent(world, topic, threshold)
            for_seconds = _seconds(heard, world.newest) if heard and world.newest else None
            said = (
                f"{name_of(topic)} has said nothing for {duration(round(for_seconds))}"
                if for_seconds is not None
                else f"{name_of(topic)} has joined, and sent no telemetry today: is {SWITCH[kind]} set?"
            )
            evidence = {"last_heard": f"{heard:%Y-%m-%d %H:%M:%S} UTC" if heard else None}
            evidence["leaves"] = ", ".join(world.leaves.get(topic, ()))
            verdict = Verdict.BREACH if breach else Verdict.FINE
            yield Finding(topic, verdict, said, for_seconds, threshold, evidence=evidence)

    return judge


def leaf_down(_tables: Tables, world: World, limits: LimitsOf) -> Iterator[Finding]:
    """A breach for each leaf all of whose nodes, at least two, are silent: they do not fail together."""
    nodes: dict[str, list[str]] = {}
    for node, leaves in world.leaves.items():
        for leaf in leaves:
            nodes.setdefault(leaf, []).append(node)
    for leaf, its in sorted(nodes.items()):
        topic = f"leaf:{leaf}"
        threshold = limits(topic)["silent_seconds"]
        gone = [name_of(node) for node in sorted(its) if is_silent(world, node, threshold)]
        down = len(gone) == len(its) and len(its) >= limits(topic)["least_nodes"]
        said = f"{len(gone)} of {len(its)} nodes on leaf {leaf} are silent"
        evidence = {"silent": ", ".join(gone)}
        verdict = Verdict.BREACH if down else Verdict.FINE
        yield Finding(topic, verdict, said, len(gone), len(its), evidence=evidence)


def numbers_late(_tables: Tables, world: World, limits: LimitsOf) -> Iterator[Finding]:
    """A breach while what arrives is old, or what has arrived is not rolled up."""
    values = limits(FLEET)
    quiet = numbers_late_seconds(world)
    waiting = _seconds(world.rolled_up_to, world.at) if world.rolled_up_to else 0.0
    late = max(quiet, waiting)
    said = (
        f"nothing has been heard of any process for {duration(round(quiet))}"
        if quiet >= waiting
        else f"roll-ups are {duration(round(waiting))} behind"
    )
    verdict = Verdict.BREACH if late > values["late_seconds"] else Verdict.FINE
    evidence = {"seconds_unheard": round(quiet), "seconds_not_rolled_up": round(waiting)}
    yield Finding(FLEET, verdict, said, late, values["late_seconds"], evidence=evidence)


def numbers_missing(_tables: Tables, world: World, _limits: LimitsOf) -> Iterator[Finding]:
    missing = world.missing_records
    said = f"{missing} records of living processes have not arrived"
    verdict = Verdict.BREACH if missing else Verdict.FINE
    yield Finding(FLEET, verdict, said, missing, 0)


def _seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds())
