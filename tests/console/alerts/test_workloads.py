"""What rules find about workloads and what looks after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from console.alerts.conditions.condition import RolloutState, WorkloadState
from console.alerts.models import Alert
from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.services import Evaluator
from console.alerts.state.evaluation import tick
from console.alerts.state.lifecycle import Verdict
from console.alerts.state.snapshot import take_snapshot
from console.orgs.models import Org
from console.workloads.leader.election import ORCHESTRATORS, is_led
from console.workloads.models import Condition, Workload
from tests.conftest import People
from tests.console.alerts.numbers import at, judged, world
from tests.console.workloads.workloads import a_rollout, a_workload, an_instance

BREACH, FINE = Verdict.BREACH, Verdict.OK
CHAT = WorkloadState("chat", 2, 1, at(0), "InstancesNotReady", "One of 2 replicas is ready.")


def seen(seconds: float, **more: Any) -> Any:
    return replace(world(seconds), **{"workloads": (CHAT,), "has_leader": True, **more})


def test_a_workload_that_is_not_ready_for_long_is_found_with_its_reason() -> None:
    rule = BY_SLUG["workload-not-ready"]
    [found] = judged(rule, {}, seen(601))
    assert (found.topic, found.verdict) == ("workload:chat", BREACH)
    assert found.sentence == "chat has not been ready for 10 min 1 s: one of 2 replicas is ready"
    assert found.evidence["ready_replicas"] == "1 of 2"
    assert [one.verdict for one in judged(rule, {}, seen(599))] == [FINE]
    ready = replace(CHAT, not_ready_since=None)
    assert [one.verdict for one in judged(rule, {}, seen(9999, workloads=(ready,)))] == [FINE]


@pytest.mark.parametrize(
    ("phase", "reason", "ended", "verdict"),
    [
        ("paused", "WorseErrors", None, BREACH),
        ("paused", "", None, FINE),  # by people
        ("running", "", None, FINE),
        ("undone", "WorseErrors", 0, BREACH),
        ("failed", "DeadlineExceeded", 0, BREACH),
        ("undone", "WorseErrors", -5 * 3600, FINE),
        ("done", "", 0, FINE),
    ],
)
def test_a_rollout_that_stopped_by_itself_is_found(
    phase: str, reason: str, ended: float | None, verdict: Verdict
) -> None:
    last = RolloutState(
        *(3, phase, reason, "4 % of requests fail instead of 1 %.", 1, 2, at(-6 * 3600)),
        ended_at=at(ended) if ended is not None else None,
    )
    now = seen(10, workloads=(replace(CHAT, rollout=last),))
    [found] = judged(BY_SLUG["rollout-stopped"], {}, now)
    assert found.verdict is verdict
    if phase == "undone":
        assert found.sentence == (
            "the rollout of chat to revision 3 was rolled back: 4 % of requests fail instead of 1 %"
        )


def test_workloads_without_a_leader_are_found_and_a_console_without_workloads_is_not() -> None:
    rule = BY_SLUG["no-orchestrator"]
    [found] = judged(rule, {}, seen(0, has_leader=False))
    assert (found.verdict, found.sentence) == (BREACH, "no orchestrator leads 1 workload")
    for now in (seen(0), seen(0, has_leader=False, workloads=())):
        assert [one.verdict for one in judged(rule, {}, now)] == [FINE]


def test_a_silent_cluster_server_is_found_while_somebody_leads() -> None:
    rule = BY_SLUG["cluster-server-silent"]
    [found] = judged(rule, {}, seen(61, cluster_silent_since=at(0)))
    assert found.sentence == "the Cluster Server has not reported for 1 min 1 s"
    verdicts = [
        judged(rule, {}, now)[0].verdict
        for now in (
            seen(61, cluster_silent_since=at(0)),
            seen(59, cluster_silent_since=at(0)),
            seen(61, cluster_silent_since=at(0), has_leader=False),
            seen(61),
        )
    ]
    assert verdicts == [BREACH, FINE, FINE, FINE]


def test_who_leads_is_read_from_the_lock(db: None) -> None:
    assert not is_led(ORCHESTRATORS)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [ORCHESTRATORS])
    assert is_led(ORCHESTRATORS)
    assert not is_led("somebody else")


def test_alerts_of_a_workload_are_its_orgs(people: People) -> None:
    now = timezone.now()
    workload = a_workload(people.acme)
    a_workload(people.acme, "gone", deleting=True)
    an_instance(workload, 0, state="ready", serving=True)
    loading = an_instance(workload, 1, state="loading")
    a_rollout(workload, phase="undone", reason="Worse", sentence="Worse.", ended_at=now)
    Condition.objects.filter(workload=workload).update(since=now - timedelta(hours=1))
    Condition.objects.create(
        workload=workload,
        type="EndpointsPublished",
        status="Unknown",
        reason="ClusterUnknown",
        since=now,
    )
    snapshot = take_snapshot(now)
    [one] = snapshot.workloads
    assert (one.name, one.ready_replicas, one.replicas) == ("talk", 1, 2)
    assert one.instances == (f"{loading.name} loading",)
    assert one.rollout is not None
    assert one.rollout.phase == "undone"
    assert (snapshot.has_leader, snapshot.cluster_silent_since) == (False, now)
    tick(now, [BY_SLUG["workload-not-ready"], BY_SLUG["rollout-stopped"]])
    found = Alert.objects.filter(topic="workload:talk").order_by("rule")
    assert [(alert.rule, alert.org) for alert in found] == [
        ("rollout-stopped", people.acme),
        ("workload-not-ready", people.acme),
    ]


RULES = [BY_SLUG["workload-not-ready"]]


def is_sick(org: Org, now: datetime, message: str) -> Workload:
    workload = a_workload(org)
    Condition.objects.filter(workload=workload).delete()
    Condition.objects.create(
        workload=workload,
        type="Ready",
        status="False",
        reason="InstancesNotReady",
        message=message,
        since=now - timedelta(hours=1),
    )
    return workload


def ticks(begin: datetime, minutes: int = 40) -> None:
    for minute in range(0, minutes, 4):
        tick(begin + timedelta(minutes=minute), RULES)


@pytest.mark.parametrize("hours", [0, 2], ids=["while it fires", "after it has ended"])
def test_an_alert_is_of_the_org_that_has_the_name_now(
    people: People, api_of: Callable[..., Any], hours: int
) -> None:
    now = timezone.now()
    former = is_sick(people.acme, now, "acme's.")
    ticks(now)
    former.delete()
    later = now + timedelta(minutes=41)
    if hours:
        ticks(later)
        later += timedelta(hours=hours)
    is_sick(people.globex, later, "globex's.")
    ticks(later)
    rows = {
        one.org.slug: (one.state, one.episode, one.sentence.rpartition(": ")[2])
        for one in Alert.objects.select_related("org")
        if one.org
    }
    assert rows == {"acme": ("resolved", 1, "acme's"), "globex": ("firing", 2, "globex's")}
    assert len({one.dedup_key for one in Alert.objects.all()}) == 2
    for user, org in ((people.viewer, "acme's"), (people.stranger, "globex's")):
        told = api_of(user).get("/api/v1/alerts?state=all").json()["items"]
        assert [org in one["sentence"] for one in told] == [True], user


def test_a_clock_that_was_ahead_once_stops_no_rule(people: People) -> None:
    now = timezone.now()
    is_sick(people.acme, now, "it fails.")
    ticks(now + timedelta(hours=3), 1)
    assert Evaluator.now().late
    assert Alert.objects.get().state == "firing"
    Condition.objects.update(status="True")
    ticks(now)
    alert = Alert.objects.get()
    assert alert.state == "resolved"
    assert max(alert.state_since, alert.begun_at) <= now + timedelta(minutes=40)
