"""Conditions on the spine: streams placed across it, and links that are nearly saturated. Pure.

A placement across the spine is a breach for as long as it exists, with or without traffic. It is known
from the sessions; for drivers without a session, from the paths in their telemetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from console.alerts.conditions.condition import (
    Crossing,
    Finding,
    Snapshot,
    Tables,
    ValuesOf,
    verdict,
)
from console.alerts.state.lifecycle import Verdict
from telemetry.queries import TOPIC
from telemetry.topics import FLEET, of_session

DIRECTIONS: Final = ("out", "in")  # of evicts and refills; "pull" is a move, which ends by itself
BITS_OF_A_GBIT: Final = 8 / 1e9
SESSIONS_SHOWN: Final = 10
_ALLOWED: Final = {
    True: "yes, by the placement rules",
    False: "no, the placement rules forbid it",
    None: "no session has placement rules for it",
}


def placed_across(tables: Tables, snapshot: Snapshot, _values: ValuesOf) -> Iterator[Finding]:
    """Breach for each stream that is placed across the spine."""
    carried = {(one.driver, one.stream): one for one in _carried(tables)}
    known = {(one.driver, one.stream): one for one in snapshot.crossings}
    drivers = {one.driver for one in snapshot.crossings} | snapshot.session_drivers
    for key, crossing in sorted(known.items()):
        bytes_moved = carried[key].bytes if key in carried else 0.0
        link = carried[key].crossing.link if key in carried else ""
        yield _finding(replace(crossing, link=link), bytes_moved)
    for key, one in sorted(carried.items()):
        # A session knows the placements of its drivers: other traffic is from before a move, or of a
        # job that has ended.
        if key[0] not in drivers and not one.crossing.session:
            yield _finding(one.crossing, one.bytes)


@dataclass(frozen=True, slots=True)
class _Carried:
    driver: str
    stream: str
    crossing: Crossing
    bytes: float


def _carried(tables: Tables) -> Iterator[_Carried]:
    """The traffic of each stream across the spine in the last hour."""
    sums: dict[tuple[str, str], _Carried] = {}
    for line in tables["crossing"]:
        labels, carried = line.labels, sum(line.numbers)
        if labels["direction"] in DIRECTIONS and carried > 0:
            key = (labels[TOPIC].partition(":")[2], labels["stream"])
            crossing = Crossing(
                session=labels["session"],
                driver=key[0],
                stream=key[1],
                box=labels["box"],
                node=labels["node"],
                port_leaf=labels["port_leaf"],
                nic_leaf=labels["nic_leaf"],
                link=labels["link"],
            )
            before = sums[key].bytes if key in sums else 0.0
            sums[key] = _Carried(*key, crossing, before + carried)
    yield from sums.values()


def _finding(one: Crossing, bytes_moved: float) -> Finding:
    link = f", {one.link}" if one.link else ""
    sentence = (
        f"stream {one.stream} of {one.session or one.driver} runs from {one.node} over {one.nic_leaf}, "
        f"the spine{link} and {one.port_leaf} to {one.box}"
    )
    evidence = {
        "session": one.session,
        "shard": one.shard or f"{one.driver}.{one.stream}",
        "box": one.box,
        "node_leaf": one.nic_leaf,
        "box_leaf": one.port_leaf,
        "spine_link": one.link,
        "bytes_in_the_last_hour": bytes_moved,
        "allowed": _ALLOWED[one.allowed],
        "why_not_a_rail": one.why,
    }
    labels = {"driver": one.driver, "stream": one.stream, "node": one.node}
    topic = of_session(one.session) if one.session else f"driver:{one.driver}"
    return Finding(topic, Verdict.BREACH, sentence, bytes_moved, None, labels, evidence)


def saturated(tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach for each link that carried more than a share of its capacity for ten seconds."""
    thresholds = values(FLEET)
    for link, sessions in sorted(_by_link(tables).items()):
        steps = [sum(step) for step in zip(*sessions.values(), strict=True)]
        gbits = snapshot.link_gbits.get(link, thresholds["link_gbits"])
        peak = max(steps, default=0.0) / 10 * BITS_OF_A_GBIT
        threshold = gbits * thresholds["burst_share"]
        most = sorted(sessions, key=lambda name: -sum(sessions[name]))[:SESSIONS_SHOWN]
        sentence = f"{link} carried {peak:.3g} of {gbits:g} Gbit/s for ten seconds"
        evidence = {"bytes_by_session": {name: sum(sessions[name]) for name in most}}
        found = verdict(breach=peak > threshold)
        yield Finding(FLEET, found, sentence, peak, threshold, {"link": link}, evidence)


def _by_link(tables: Tables) -> Mapping[str, Mapping[str, list[float]]]:
    """The bytes of each step, by link and session. A step without data carried nothing."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in tables["crossing"]:
        if link := line.labels["link"]:
            steps = [float(value) if isinstance(value, int | float) else 0.0 for value in line.values]
            found.setdefault(link, {})[line.labels["session"]] = steps
    return found
