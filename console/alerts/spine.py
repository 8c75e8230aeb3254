"""Judges of the spine: who is placed across it, and in what bursts its links are full. Pure.

A placement across the spine is warned of from when on it is there until it is not, whether bytes flow or
not: once. It is known from the sessions; of drivers that belong to none, from the paths that they tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from console.alerts.judges import numbers
from console.alerts.life import Verdict
from console.alerts.rules import Crossing, Finding, LimitsOf, Tables, World
from telemetry.queries import TOPIC
from telemetry.topics import FLEET, of_session

ACROSS: Final = (
    "out",
    "in",
)  # directions of what a stream moves; a pull is a move, which ends by itself
BITS_OF_A_GBIT: Final = 8 / 1e9
SESSIONS_SHOWN: Final = 10


def placed(tables: Tables, world: World, _limits: LimitsOf) -> Iterator[Finding]:
    """A breach for each stream that is placed across the spine."""
    told = {(one.driver, one.stream): one for one in _told(tables)}
    known = {(one.driver, one.stream): one for one in world.crossings}
    drivers = {one.driver for one in world.crossings} | world.drivers_of_sessions
    for key, crossing in sorted(known.items()):
        bytes_moved = told[key].bytes if key in told else 0.0
        link = told[key].crossing.link if key in told else ""
        yield _warning(replace(crossing, link=link), bytes_moved)
    for key, one in sorted(told.items()):
        # Where a session knows the driver, it knows its placements: the rest is of before a move.
        if key[0] not in drivers:
            yield _warning(one.crossing, one.bytes)


@dataclass(frozen=True, slots=True)
class _Carried:
    driver: str
    stream: str
    crossing: Crossing
    bytes: float


def _told(tables: Tables) -> Iterator[_Carried]:
    """What drivers told of in the last hour, of each stream."""
    sums: dict[tuple[str, str], _Carried] = {}
    for line in tables["crossing"]:
        its, carried = line.labels, sum(numbers(line.values))
        if its["direction"] in ACROSS and carried > 0:
            key = (its[TOPIC].partition(":")[2], its["stream"])
            crossing = Crossing(
                session=its["session"],
                driver=key[0],
                stream=key[1],
                box=its["box"],
                node=its["node"],
                port_leaf=its["port_leaf"],
                nic_leaf=its["nic_leaf"],
                link=its["link"],
            )
            before = sums[key].bytes if key in sums else 0.0
            sums[key] = _Carried(*key, crossing, before + carried)
    yield from sums.values()


def _warning(one: Crossing, bytes_moved: float) -> Finding:
    link = f" and {one.link}" if one.link else ""
    allowed = {
        True: "the rules allow it",
        False: "the rules do not allow it",
        None: "no session's rules",
    }
    said = (
        f"stream {one.stream} of {one.session or one.driver} goes from {one.node} over {one.nic_leaf}, "
        f"the spine{link} and {one.port_leaf} to {one.box}"
    )
    evidence = {
        "session": one.session,
        "shard": one.shard or f"{one.driver}.{one.stream}",
        "box": one.box,
        "leaf_of_the_node": one.nic_leaf,
        "leaf_of_the_box": one.port_leaf,
        "spine_link": one.link,
        "bytes_in_the_last_hour": bytes_moved,
        "allowed": allowed[one.allowed],
        "why_not_better": one.why,
    }
    labels = {"driver": one.driver, "stream": one.stream, "node": one.node}
    topic = of_session(one.session) if one.session else f"driver:{one.driver}"
    return Finding(topic, Verdict.BREACH, said, bytes_moved, None, labels, evidence)


def bursts(tables: Tables, world: World, limits: LimitsOf) -> Iterator[Finding]:
    """A breach for each link of which ten seconds took more than a share of what it can carry."""
    values = limits(FLEET)
    for link, sessions in sorted(_by_link(tables).items()):
        steps = [sum(step) for step in zip(*sessions.values(), strict=True)]
        gbits = world.link_gbits.get(link, values["link_gbits"])
        peak = max(steps, default=0.0) / 10 * BITS_OF_A_GBIT
        limit = gbits * values["burst_share"]
        most = sorted(sessions, key=lambda name: -sum(sessions[name]))[:SESSIONS_SHOWN]
        said = f"{link} carried {peak:.3g} of its {gbits:g} Gbit/s for ten seconds"
        evidence = {"bytes_by_session": {name: sum(sessions[name]) for name in most}}
        verdict = Verdict.BREACH if peak > limit else Verdict.FINE
        yield Finding(FLEET, verdict, said, peak, limit, {"link": link}, evidence)


def _by_link(tables: Tables) -> Mapping[str, Mapping[str, list[float]]]:
    """The bytes of each step, by link and session; nothing told is nothing carried."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in tables["crossing"]:
        if link := line.labels["link"]:
            steps = [float(value) if isinstance(value, int | float) else 0.0 for value in line.values]
            found.setdefault(link, {})[line.labels["session"]] = steps
    return found
