"""Conditions on processes that do not report: one, all on a leaf, or all. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from console.alerts.conditions.condition import (
    Condition,
    Finding,
    Snapshot,
    Tables,
    ValuesOf,
    name_of,
    verdict,
)
from console.sessions.plans.losses import Verdict as Replacement
from telemetry.topics import FLEET, of_session
from telemetry.units import duration

SILENT_SECONDS: Final = "silent_seconds"
# What enables telemetry.
SWITCH: Final = {
    "node": "KVSS_AGENT_TELEMETRY",
    "driver": "SWDRIVER_TELEMETRY",
    "brain": "BRAIN_TELEMETRY",
}


def is_silent(snapshot: Snapshot, topic: str, seconds: float) -> bool:
    """Whether a topic has not reported for this long before the newest report of any process.

    If nothing arrives at all, the agents are not the cause; nor are they while nobody received anything,
    as when all is stopped and started again. A process that just joined has had no time to report, also
    where one of its name reported before.
    """
    newest = snapshot.newest_report
    signs = [found[topic] for found in (snapshot.last_seen, snapshot.joined) if topic in found]
    if newest is None or not signs:
        return newest is not None
    since = max(signs)
    silent_seconds = (newest - since).total_seconds()
    if snapshot.not_received:
        start, end = snapshot.not_received
        silent_seconds -= max(0.0, (end - max(start, since)).total_seconds())
    return silent_seconds > seconds


def telemetry_late_seconds(snapshot: Snapshot) -> float:
    """The age of the newest report of any process."""
    return _seconds(snapshot.newest_report, snapshot.at) if snapshot.newest_report else 0.0


def not_reporting(kind: str, *, registered_only: bool = False) -> Condition:
    """Breach for each process of a kind that has reported or joined, and does not report now."""

    def condition(_tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
        known = snapshot.joined if registered_only else {*snapshot.last_seen, *snapshot.joined}
        for topic in sorted(one for one in known if one.startswith(f"{kind}:")):
            yield _not_reporting(snapshot, topic, kind, values(topic)[SILENT_SECONDS])

    return condition


def _not_reporting(snapshot: Snapshot, topic: str, kind: str, threshold: float) -> Finding:
    last_seen, newest = snapshot.last_seen.get(topic), snapshot.newest_report
    for_seconds = _seconds(last_seen, newest) if last_seen and newest else None
    sentence = (
        f"{name_of(topic)} has not reported for {duration(round(for_seconds))}"
        if for_seconds is not None
        else f"{name_of(topic)} has joined but sent no telemetry today: check that {SWITCH[kind]}, or "
        "TIDEGATE_OWN_TELEMETRY_URL of the console, is set"
    )
    evidence = {
        "last_seen": f"{last_seen:%Y-%m-%d %H:%M:%S} UTC" if last_seen else None,
        "leaves": ", ".join(snapshot.leaves.get(topic, ())),
    }
    found = verdict(breach=is_silent(snapshot, topic, threshold))
    return Finding(topic, found, sentence, for_seconds, threshold, evidence=evidence)


def leaf_down(_tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach for each leaf of which no node reports: nodes do not fail together by chance. A node that
    never joined does not count."""
    nodes: dict[str, list[str]] = {}
    for node in snapshot.leaves.keys() & {*snapshot.last_seen, *snapshot.joined}:
        leaves = snapshot.leaves[node]
        for leaf in leaves:
            nodes.setdefault(leaf, []).append(node)
    for leaf, members in sorted(nodes.items()):
        topic = f"leaf:{leaf}"
        thresholds = values(topic)
        silent = [
            name_of(node)
            for node in sorted(members)
            if is_silent(snapshot, node, thresholds[SILENT_SECONDS])
        ]
        breach = len(silent) == len(members) and len(members) >= thresholds["least_nodes"]
        sentence = f"{len(silent)} of {len(members)} nodes on leaf {leaf} are not reporting"
        evidence = {"not_reporting": ", ".join(silent)}
        found = verdict(breach=breach)
        yield Finding(topic, found, sentence, len(silent), len(members), evidence=evidence)


def not_replaced(_tables: Tables, snapshot: Snapshot, _values: ValuesOf) -> Iterator[Finding]:
    """Breach for each lost node of a session whose streams can't be placed on other nodes."""
    for one in snapshot.lost_nodes:
        evidence = {"lost_since": f"{one.since:%Y-%m-%d %H:%M:%S} UTC", "replacement": one.verdict}
        yield Finding(
            of_session(one.session),
            verdict(breach=one.verdict == Replacement.BLOCKED),
            one.sentence[:1].lower() + one.sentence[1:].rstrip("."),
            labels={"node": one.node},
            evidence=evidence,
        )


def telemetry_late(_tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach while no new telemetry arrives, or what arrived is not rolled up."""
    threshold = values(FLEET)["late_seconds"]
    quiet = telemetry_late_seconds(snapshot)
    waiting = _seconds(snapshot.rolled_up_to, snapshot.at) if snapshot.rolled_up_to else 0.0
    late = max(quiet, waiting)
    sentence = (
        f"no process has reported for {duration(round(quiet))}"
        if quiet >= waiting
        else f"roll-ups are {duration(round(waiting))} behind"
    )
    evidence = {"newest_report_age_seconds": round(quiet), "roll_up_lag_seconds": round(waiting)}
    found = verdict(breach=late > threshold)
    yield Finding(FLEET, found, sentence, late, threshold, evidence=evidence)


def telemetry_missing(_tables: Tables, snapshot: Snapshot, _values: ValuesOf) -> Iterator[Finding]:
    missing = snapshot.missing_records
    sentence = f"{missing:,} records of running processes have not arrived"
    yield Finding(FLEET, verdict(breach=missing > 0), sentence, missing, 0)


def _seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds())
