"""What is judged when the last process is back, and the table of what was seen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from tests.chaos.killer import Killer
from tests.chaos.leaders import Leaders
from tests.chaos.loads import Loads, Request
from tests.chaos.outages import RULE, TOPIC, Outages
from tests.chaos.scene import CLUSTER, WORKLOAD, Chaos
from tests.chaos.viewers import Viewer

SHOWN_MAX: Final = 5  # broken promises of one kind
NOTE: Final = "handover.note"
NOTES: Final = "SELECT text, count(*) FROM handover_note GROUP BY text"
AUDITED: Final = "SELECT after->>'text', count(*) FROM audit_auditentry WHERE action = %s GROUP BY 1"
# An alert that nobody knows the state of, and that fires then, goes on firing.
CHANGES: Final = """
SELECT alert.rule, alert.topic, change.episode, change.after, count(*)
FROM alerts_transition change JOIN alerts_alert alert ON alert.id = change.alert_id
WHERE change.after IN ('firing', 'resolved') AND change.before <> 'no_data'
GROUP BY alert.id, alert.rule, alert.topic, change.episode, change.after
"""
EVENTS: Final = "SELECT id FROM telemetry_event WHERE %s = ANY(topics) ORDER BY id"


@dataclass
class Result:
    """`broken`: the promises that did not hold, in sentences. `rows`: what was seen, for people."""

    seed: int
    broken: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)

    def saw(self, what: str, text: object) -> None:
        self.rows.append((what, str(text)))

    def breaks(self, what: str, found: Sequence[object]) -> None:
        """A promise, and what there is that should not be."""
        self.broken += [f"{what}: {one}" for one in found[:SHOWN_MAX]]
        if len(found) > SHOWN_MAX:
            self.broken.append(f"{what}: {len(found) - SHOWN_MAX} more")

    def table(self) -> str:
        width = max(len(what) for what, _ in self.rows)
        lines = [f"{what:<{width}}  {text}" for what, text in self.rows]
        return "\n".join([f"seed {self.seed}", *lines, *(f"BROKEN: {one}" for one in self.broken)])


@dataclass(frozen=True)
class Seen:
    """`instances` and `starts`: of the workload and of each process, before the first kill."""

    began: float
    killer: Killer
    loads: Loads
    viewers: Sequence[Viewer]
    alerts: Outages
    leaders: Leaders
    instances: frozenset[str]
    starts: Mapping[str, int]


def judge(scene: Chaos, seed: int, seen: Seen) -> Result:
    result = Result(seed)
    _judge_kills(result, scene, seen)
    _judge_requests(result, seen)
    _judge_writes(result, scene, seen.loads)
    for viewer in seen.viewers:
        _judge_viewer(result, scene, viewer, seen)
    _judge_alerts(result, scene, seen)
    _judge_leaders(result, seen.leaders)
    _judge_serving(result, scene, seen.instances)
    _judge_numbers(result, scene)
    return result


def _judge_kills(result: Result, scene: Chaos, seen: Seen) -> None:
    killer, took = seen.killer, defaultdict[str, list[float]](list)
    result.kills = killer.kills
    for one in killer.outages:
        took[one.victim.kind].append((one.ended or one.began) - one.began)
    result.saw("kills", result.kills.total())
    for kind, seconds in sorted(took.items()):
        back = f"back after {median(seconds):.1f} s, {max(seconds):.1f} s at most"
        result.saw(f"  {kind}", f"{len(seconds)} ({back})")
    order = [f"{one.began - seen.began:.0f} s {one.victim.name}" for one in killer.outages]
    result.saw("  in this order", ", ".join(order))
    result.breaks("never came back", [one.victim.name for one in killer.away])
    more = {
        name: count - seen.starts[name] - result.kills[name] for name, count in scene.starts().items()
    }
    ended = [
        f"{name}, {count} times (it said last: {scene.last_words(name)})"
        for name, count in more.items()
        if count
    ]
    result.breaks("was started and not killed before", ended)


def _judge_requests(result: Result, seen: Seen) -> None:
    excused, elsewhere = Counter[str](), defaultdict[str, list[Request]](list)
    for one in seen.loads.failed:
        if seen.killer.was_away(one.place, one.began, one.ended):
            excused[one.load] += 1
        else:
            elsewhere[one.load].append(one)
    for load, count in sorted(Counter(one.load for one in seen.loads.requests).items()):
        slowest = max(one.ended - one.began for one in seen.loads.requests if one.load == load)
        failed = f"failed: {excused[load]} in the killed process, {len(elsewhere[load])} elsewhere"
        result.saw(f"{load} requests", f"{count} ({failed}; slowest {slowest:.1f} s)")
        sentences = [
            f"{one.place} after {one.began - seen.began:.1f} s, for {one.ended - one.began:.1f} s: "
            f"{one.fault}"
            for one in elsewhere[load]
        ]
        result.breaks(f"a {load} request failed elsewhere", sentences)


def _judge_writes(result: Result, scene: Chaos, loads: Loads) -> None:
    answered = [one for one in loads.writes if one.answered]
    again = [one for one in answered if one.tries > 1]
    replayed = sum(one.was_replayed for one in again)
    result.breaks("a write was never answered", [one for one in loads.writes if not one.answered])
    there = Counter(dict(scene.rows(NOTES)))
    audited = Counter(dict(scene.rows(AUDITED, NOTE)))
    [[events]] = scene.rows("SELECT count(*) FROM telemetry_event WHERE kind = %s", NOTE)
    lost = [one.text for one in answered if not there[one.text]]
    twice = [text for text, count in there.items() if count > 1]
    result.saw(
        "writes",
        f"{len(answered)} answered, {len(again)} by another try ({replayed} were done before); "
        f"{len(lost)} lost, {len(twice)} twice",
    )
    result.breaks("an answered write is lost", lost)
    result.breaks("a write is there twice", twice)
    result.breaks("a note that nobody wrote", sorted(there.keys() - {one.text for one in loads.writes}))
    result.breaks("writes and their audit trail differ", sorted((there - audited) + (audited - there)))
    if events != there.total():
        result.broken.append(f"{there.total()} writes have {events} events.")


def _judge_viewer(result: Result, scene: Chaos, viewer: Viewer, seen: Seen) -> None:
    web = viewer.web.victim
    for name, topic in viewer.topics.items():
        unnoticed = topic.unnoticed([number for [number] in scene.rows(EVENTS, name)])
        result.saw(
            f"frames of {name} at {web}",
            f"{topic.frames} ({len(topic.events)} events; gaps: {topic.missed} noticed by seq, "
            f"{len(topic.gaps)} announced, {len(unnoticed)} unnoticed)",
        )
        result.breaks(f"{name} at {web}", topic.broken)
        result.breaks(f"an event of {name} was missed unnoticed at {web}", unnoticed)
        twice = [one for one, count in topic.events.items() if count > 1]
        result.breaks(f"an event of {name} came twice at {web}", twice)
    elsewhere = [
        f"after {one.at - seen.began:.1f} s: {one.why}"
        for one in viewer.breaks
        if not seen.killer.was_away(one.place, one.began, one.at)
    ]
    count = len(viewer.breaks)
    result.saw(f"connections to {web}", f"{viewer.connections} ({count} ended or failed)")
    result.breaks(f"a connection to {web} ended elsewhere", elsewhere)


def _judge_alerts(result: Result, scene: Chaos, seen: Seen) -> None:
    alerts, changes = seen.alerts, scene.rows(CHANGES)
    ours = Counter(row[3] for row in changes if row[:2] == (RULE, TOPIC))
    others = {(rule, topic) for rule, topic, *_ in changes if (rule, topic) != (RULE, TOPIC)}
    # Instances begin anew with their Cluster Server, and on a slow machine that takes as long as a rule.
    ended = {one for one in others if _is_of_an_instance(*one)} if seen.killer.kills[CLUSTER] else set()
    twice = [row for row in changes if row[-1] > 1]
    result.saw(
        "alerts",
        f"{alerts.count} outages of an agent: {ours['firing']} firing, {ours['resolved']} resolved, "
        f"{len(twice)} twice; {len(ended)} of drivers whose Cluster Server was killed",
    )
    if not alerts.count == ours["firing"] == ours["resolved"]:
        result.broken.append(f"{alerts.count} outages of an agent, and alerts {dict(ours)}.")
    result.breaks("never came", alerts.missing)
    result.breaks("an alert fired or resolved twice", twice)
    result.breaks("an alert without a cause", sorted(map(" of ".join, others - ended)))
    notified = alerts.notified()
    repeated = sum(count - 1 for count in notified.values())
    result.saw(
        "notifications",
        f"{len(notified)} ({repeated} sent again, with the same key; within "
        f"{alerts.waited_seconds:.0f} s of the cause)",
    )
    more = [name for name, keys in alerts.keys().items() if len(keys) > 1]
    result.breaks("a notification was sent under several keys", more)
    workers = [one for one in seen.killer.outages if one.victim.kind == "worker"]
    if repeated > len(workers):
        result.broken.append(f"{repeated} notifications were sent again, for {len(workers)} kills.")


def _is_of_an_instance(rule: str, topic: str) -> bool:
    return rule == "driver-not-reporting" and topic.startswith(f"driver:{WORKLOAD}-")


def _judge_leaders(result: Result, leaders: Leaders) -> None:
    result.saw("alerts evaluated", f"{leaders.alerts_age_seconds:.1f} s ago at most")
    for name, reigns in leaders.reigns.items():
        without = f"{reigns.without_seconds:.1f} s without one at most"
        result.saw(f"leaders: {name}", f"{len(reigns.leaders)} ({without})")
        if reigns.at_once_max > 1:
            result.broken.append(f"{reigns.at_once_max} processes led at once: {name}.")


def _judge_serving(result: Result, scene: Chaos, before: frozenset[str]) -> None:
    """What served serves on, in the same instances, and brains that were killed answer."""
    found = {one["name"] for one in scene.instances(WORKLOAD, with_ended=True)}
    result.saw("instances", f"{len(before & found)} of {len(before)} as before")
    result.breaks("an instance is new or gone", sorted(found ^ before))
    result.breaks("is not ready", [] if scene.is_ready(WORKLOAD) else [scene.conditions(WORKLOAD)])
    for brain in scene.brains:
        answer = scene.chat("At last.", brain_url=brain.url)
        result.breaks(f"{brain.victim} does not serve", [] if answer.is_success else [answer.text])


def missing_records(scene: Chaos) -> Sequence[object]:
    """Sources of which a record below the last has not arrived: on its way, for as long as whoever
    took over from a killed ingest needs, or lost."""
    return scene.rows("SELECT name, missing FROM telemetry_source WHERE missing > 0")


def _judge_numbers(result: Result, scene: Chaos) -> None:
    """Records of processes: none is missing, and none was set aside."""
    missing = missing_records(scene)
    dead = scene.rows("SELECT cause, source, reason FROM telemetry_deadletter")
    [[sources]] = scene.rows("SELECT count(*) FROM telemetry_source")
    result.saw(
        "telemetry", f"{sources} sources, {len(missing)} with missing records, {len(dead)} dead letters"
    )
    result.breaks("records are missing", missing)
    result.breaks("records were set aside", dead)
