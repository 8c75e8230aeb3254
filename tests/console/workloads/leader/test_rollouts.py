"""What the leader makes of a workload that is created or changed."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.utils import timezone

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.fleet.membership import joins, tokens
from console.fleet.models import JoinToken, ProcessKind
from console.fleet.nodes import Impossible
from console.routing.models import Replica
from console.sessions.models import Job, Session
from console.workloads import changes
from console.workloads.leader import actions, health, orchestrator
from console.workloads.leader.world import Traffic
from console.workloads.models import Condition, Instance, Rollout, Workload
from telemetry.decoder import decode
from tests.console.fleet.worlds import CONTROL_TOKEN, DRIVER_FACTS
from tests.console.sessions.fleets import make_driver, make_fleet
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.leader.leaders import (
    QUICK,
    WITHOUT_CACHE,
    Leader,
    condition,
    events,
    is_complete,
    told,
)
from tests.console.workloads.workloads import locked, make_workload, wanted

pytestmark = pytest.mark.slow


def test_a_workload_comes_up_and_brains_hear_of_it(
    cluster: FakeCluster, leader: Leader, redis_url: str
) -> None:
    limits = {"memory_bytes": "1GiB", "cpu_cores": 1.5}
    make_workload(replicas=2, limits=limits, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    told_limits = [one.resources for one in cluster.specs.values()]
    assert told_limits == [pb.Resources(memory_bytes=1 << 30, cpu_millis=1500)] * 2
    rows = Instance.objects.filter(ended_at=None, serving=True)
    assert told(redis_url) == {one.replica: one.url for one in rows}
    assert len(rows) == 2
    places = Replica.objects.all()
    assert {one.name for one in places} == {"talk-0", "talk-1"}
    assert {(one.url, one.endpoint) for one in places} == {("", "redis")}
    assert condition("Ready") == ("True", "Ready")
    assert Workload.objects.get().observed_generation == Workload.objects.get().generation
    assert sum(leader.orchestrator.figures.lag.counts) == 2
    begun_and_over = {"workload.rollout-begun", "workload.rollout-complete"}
    assert begun_and_over | {"workload.compiled", "workload.ready"} <= events("talk")


def test_what_the_cluster_refuses_is_said_and_is_not_the_revisions_fault(
    cluster: FakeCluster, leader: Leader
) -> None:
    cluster.refuses = "There is a Service talk already."
    make_workload(replicas=1, **WITHOUT_CACHE, **QUICK)
    said = Condition.objects.filter(type="InstancesReady", reason="ClusterRefuses")
    leader.until("it is said", said.exists)
    message = Condition.objects.get(type="InstancesReady").message
    assert message == (
        "0 of 1 are ready. The Cluster Server refuses it: There is a Service talk already."
    )
    leader.ahead += 600.0
    for _ in range(5):
        leader.orchestrator.round()
        leader.ahead += 5.0
    assert condition("RolloutComplete")[1] != "DeadlineExceeded"
    cluster.refuses = ""
    leader.until("it is rolled out", is_complete)


def test_who_has_waited_for_room_has_the_time_to_start_from_then_on(
    cluster: FakeCluster, leader: Leader
) -> None:
    make_workload(replicas=1, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.has_room = False
    changes.update(SYSTEM, locked(SYSTEM), wanted(replicas=1, tokens_max=1000, **WITHOUT_CACHE, **QUICK))

    def of_second() -> Instance | None:
        return Instance.objects.filter(revision__number=2, reason="WaitingForCapacity").first()

    leader.until("the new one waits", of_second)
    new = of_second()
    assert new
    waited = timezone.now() - timedelta(minutes=20)
    Instance.objects.filter(pk=new.pk).update(created_at=waited)
    Rollout.objects.filter(ended_at=None).update(started_at=waited)
    for _ in range(3):
        leader.orchestrator.round()
        leader.ahead += 6.0
    cluster.has_room = True
    cluster.say(new.name, state=pb.STARTING, reason="Starting", sentence="Its engine starts.")
    leader.until("that is known", lambda: Instance.objects.filter(pk=new.pk, reason="Starting").exists())
    leader.orchestrator.round()
    assert not Rollout.objects.filter(phase="undone").exists()
    url = f"http://{new.name}:80"
    cluster.say(new.name, state=pb.READY, reason="", sentence="", cache=pb.NO_CACHE, url=url)
    leader.until("it is rolled out", is_complete)


def test_a_node_whose_clock_is_ahead_delays_no_rollout(cluster: FakeCluster, leader: Leader) -> None:
    cluster.clock_ahead = 3600.0
    ready: dict[str, Any] = {"rollout": {**QUICK["rollout"], "ready_seconds": 5}}
    make_workload(replicas=1, **WITHOUT_CACHE, **ready)
    leader.until("it is rolled out", is_complete)
    changes.update(SYSTEM, locked(SYSTEM), wanted(replicas=1, tokens_max=1000, **WITHOUT_CACHE, **ready))
    leader.until("the change is rolled out", is_complete)
    assert leader.ahead < 1000.0


def test_a_change_is_rolled_out_without_a_moment_without_endpoints(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    make_workload(replicas=2, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    before = told(redis_url)
    least = [2]

    def is_done() -> bool:
        least[0] = min(least[0], len(told(redis_url)))
        return is_complete()

    changes.update(SYSTEM, locked(SYSTEM), wanted(replicas=2, tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    leader.until("the change is rolled out", is_done)
    assert least == [2]
    assert not set(told(redis_url).values()) & set(before.values())
    leader.until("the old ones are gone", lambda: len(cluster.statuses()) == 2)
    assert [one.phase for one in Rollout.objects.order_by("pk")] == ["done", "done"]


def test_a_revision_that_ends_by_itself_is_rolled_back(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    make_workload(replicas=2, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    before = told(redis_url)
    cluster.bad.add(2)
    changes.update(SYSTEM, locked(SYSTEM), wanted(replicas=2, tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    leader.until("it is rolled back", lambda: Workload.objects.get().revision.number == 3)  # type: ignore[union-attr]
    leader.until("it is what it was", is_complete)
    assert told(redis_url) == before
    undone = Rollout.objects.get(phase="undone")
    assert undone.reason == "InstancesFail"
    assert undone.sentence.endswith("The last one: It ran out of memory.")
    assert {"workload.rollout-begun", "workload.instance-ended"} <= events("talk")
    ended = Instance.objects.filter(failed=True)
    assert {one.end_reason for one in ended} == {"It ran out of memory."}
    assert Workload.objects.get().revision.same_as == 1  # type: ignore[union-attr]


def test_what_somebody_changes_meanwhile_is_not_rolled_back(
    leader: Leader, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy comes between the verdict and the act: they are two transactions."""
    make_workload(replicas=2, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.bad.add(2)
    changes.update(SYSTEM, locked(SYSTEM), wanted(replicas=2, tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    judged, acts = [], actions._roll_back

    def late(*judgement: Any) -> None:
        judged.append(judgement)
        if len(judged) == 1:
            remedy = wanted(replicas=2, tokens_max=2000, **WITHOUT_CACHE, **QUICK)
            changes.update(SYSTEM, locked(SYSTEM), remedy)
        acts(*judgement)

    monkeypatch.setattr(actions, "_roll_back", late)
    leader.until("the remedy is rolled out", lambda: judged and is_complete())
    assert len(judged) == 1
    workload = Workload.objects.get()
    assert workload.revision
    assert (workload.revision.number, workload.spec().tokens_max) == (3, 2000)
    assert "undone" not in Rollout.objects.values_list("phase", flat=True)


def test_a_revision_that_is_slower_is_rolled_back_and_the_numbers_are_kept(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    old = Traffic(requests=1000, ttft_seconds=0.1, per_second=2.0)
    new = Traffic(requests=500, errors=1, ttft_seconds=0.5, ttft_range=(0.4, 0.6), per_second=1.5)
    monkeypatch.setattr(orchestrator, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(health, "traffic", lambda *_: (new, old))
    slower = {"rollout": {**QUICK["rollout"], "ready_seconds": 3}}
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=1000, **WITHOUT_CACHE, **slower))
    leader.until("it is rolled back", lambda: Workload.objects.get().revision.number == 3)  # type: ignore[union-attr]
    leader.until("it is what it was", is_complete)
    assert Workload.objects.get().revision.number == 3, "what undid 2 does not count for 3"  # type: ignore[union-attr]
    assert Rollout.objects.order_by("-pk")[0].traffic is None
    undone = Rollout.objects.get(phase="undone")
    assert undone.reason == "FirstTokenSlower"
    shown = ("requests", "errors", "ttft_seconds", "per_second")
    assert undone.traffic == {
        side: {name: asdict(traffic)[name] for name in shown}
        for side, traffic in (("new", new), ("old", old))
    }


def test_an_instance_that_knows_another_address_of_the_console_is_replaced(
    cluster: FakeCluster, leader: Leader, redis_url: str, settings: Any
) -> None:
    """One at a time, as a box is left: no rollout, and no moment without an endpoint."""
    cluster.layout = {"name": "chat", "groups": []}
    settings.PUBLIC_URL = "http://before:8000"
    make_fleet(boxes=4)
    make_workload(**QUICK)
    leader.until("an instance is applied", lambda: len(cluster.statuses()) == 1)
    [old] = cluster.statuses()
    make_driver("talk-1-0", workload="talk")
    cluster.say(old, state=pb.READY, cache=pb.ATTACHED, url="http://old:80")
    leader.until("it is rolled out", is_complete)
    settings.PUBLIC_URL = "https://after"
    leader.until("a new one is applied", lambda: len(cluster.statuses()) == 2)
    assert condition("RolloutComplete") == ("False", "ConsoleMoved")
    [new] = cluster.statuses().keys() - {old}
    cache = decode(cluster.specs[new].spec, dict[str, Any])["cache"]
    assert (cache["console"], cache.get("plain_console", False)) == ("https://after", False)
    cluster.say(new, state=pb.STANDBY, cache=pb.WAITING, url="http://new:80")
    leader.until("the old one lets go", lambda: cluster.specs[old].goal == pb.RELEASE_CACHE)
    cluster.say(old, cache=pb.RELEASED)
    cluster.say(new, state=pb.READY, cache=pb.ATTACHED)
    leader.until("brains are told", lambda: told(redis_url) == {"talk-0": "http://new:80"})
    leader.until("the old one is gone", lambda: old not in cluster.statuses())
    leader.until("it is said", lambda: condition("RolloutComplete") == ("True", "Complete"))
    assert Rollout.objects.count() == 1, "nothing was rolled out"


def test_a_cache_gets_its_job_when_its_driver_has_joined_and_moves_with_the_replica(
    cluster: FakeCluster, leader: Leader, redis_url: str
) -> None:
    """A rollout hands it over: the new one waits, the old one releases it, the endpoint switches."""
    cluster.layout = {"name": "chat", "groups": []}
    make_fleet(boxes=4)
    make_workload(**QUICK)
    leader.until("an instance is applied", lambda: len(cluster.statuses()) == 1)
    [old] = cluster.statuses()
    spec = decode(cluster.specs[old].spec, dict[str, Any])
    assert spec["cache"]["driver"] == "talk-1-0"
    assert decode(cluster.specs[old].secrets["join_token"], str).startswith("tgj_")
    assert decode(cluster.specs[old].secrets["api_key"], str) == str(Replica.objects.get().api_key) != ""
    make_driver("talk-1-0", workload="talk")
    cluster.say(old, state=pb.READY, cache=pb.WAITING, url="http://old:80")
    leader.until("its job is started", lambda: Job.objects.filter(driver__name="talk-1-0").exists())
    cluster.say(old, cache=pb.ATTACHED)
    leader.until("it is rolled out", is_complete)
    assert Replica.objects.get().driver.name == "talk-1-0"  # type: ignore[union-attr]
    leader.until(
        "nobody can join with its token any more", lambda: JoinToken.objects.get().state == "revoked"
    )

    changes.restart(SYSTEM, locked(SYSTEM))
    leader.until("a new one is applied", lambda: len(cluster.statuses()) == 2)
    [new] = cluster.statuses().keys() - {old}
    cluster.say(new, state=pb.STANDBY, cache=pb.WAITING, url="http://new:80")
    leader.until("the old one lets go", lambda: cluster.specs[old].goal == pb.RELEASE_CACHE)
    assert told(redis_url) == {"talk-0": "http://old:80"}
    cluster.say(old, cache=pb.RELEASED)
    cluster.say(new, state=pb.READY, cache=pb.ATTACHED)
    leader.until("brains are told", lambda: told(redis_url) == {"talk-0": "http://new:80"})
    leader.until("the old one is drained", lambda: old not in cluster.statuses())
    leader.until("it is complete", is_complete)
    assert Session.objects.get().boxes_desired == 1


def test_who_serves_without_memory_is_said_with_the_reason_and_can_still_join(
    cluster: FakeCluster, leader: Leader, redis_url: str
) -> None:
    """An engine has its driver's identity before that driver has joined."""
    cluster.layout = {"name": "chat", "groups": []}
    make_fleet(boxes=4)
    make_workload(**QUICK)
    leader.until("an instance is applied", lambda: len(cluster.statuses()) == 1)
    [name] = cluster.statuses()
    cluster.say(name, state=pb.READY, cache=pb.ATTACHED, url="http://here:80")
    leader.until("it serves", lambda: condition("Ready") == ("True", "Ready"))
    assert condition("CacheWarm") == ("False", "WithoutMemory")
    assert JoinToken.objects.get().state == "active"
    many = [{"name": "full", "bytes_per_token": [8] * 100}]
    make_driver("talk-1-0", {"name": "chat", "groups": many}, workload="talk")
    leader.until(
        "its driver asks for more than its boxes have",
        lambda: "shards" in Condition.objects.get(type="CacheWarm").message,
    )


def test_the_tokens_of_instances_are_theirs_alone_and_do_not_count(db: None) -> None:
    until = timezone.now() + timedelta(hours=1)
    issue = partial(tokens.issue, SYSTEM, kind=ProcessKind.DRIVER, uses=1, expires_at=until)
    for number in range(tokens.ACTIVE_MAX + 1):
        own, _ = issue(name=f"talk-1-{number}", workload="talk")
    anybody, _ = issue()
    with pytest.raises(Impossible, match="lets talk-1-100 join, and not chat-1-0"):
        joins.join_driver(own, "chat-1-0", CONTROL_TOKEN, DRIVER_FACTS)
    assert joins.join_driver(own, "talk-1-100", CONTROL_TOKEN, DRIVER_FACTS).workload == "talk"
    with pytest.raises(Impossible, match="There is a driver talk-1-100 of workload talk"):
        joins.join_driver(anybody, "talk-1-100", CONTROL_TOKEN, DRIVER_FACTS)
