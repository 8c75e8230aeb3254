"""The leader with PostgreSQL, Redis and a Cluster Server that speaks the real protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock
from urllib.parse import urlsplit, urlunsplit

import grpc
import pytest
import redis
from django.db import connection
from django.utils import timezone

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.fleet.membership import joins, tokens
from console.fleet.models import Box, Driver, JoinToken, ProcessKind
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.models import Operation
from console.routing.models import Replica, ServedModel
from console.sessions.changes import box_drains
from console.sessions.models import Job, Session, SessionBox
from console.workloads import buckets, changes
from console.workloads.leader import actions, compilations, health, orchestrator, rendering, store
from console.workloads.leader.cluster import ClusterLink
from console.workloads.leader.election import Election
from console.workloads.leader.endpoints import EndpointWriter
from console.workloads.leader.orchestrator import Orchestrator
from console.workloads.leader.store import START_JOB
from console.workloads.leader.world import State, Traffic
from console.workloads.models import Condition, Instance, Revision, Rollout, Workload
from inference_brain.endpoints import read
from telemetry.decoder import Malformed, decode
from telemetry.events import events_of
from telemetry.records import ENDPOINTS
from tests.console.fleet.worlds import CONTROL_TOKEN, DRIVER_FACTS
from tests.console.sessions.fleets import make_driver, make_fleet
from tests.console.sessions.obeying import Obeying, obeying
from tests.console.workloads.buckets import CREDENTIALS, stored
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.workloads import (
    a_workload,
    an_instance,
    locked,
    make_workload,
    scale,
    settle,
    wanted,
)
from tests.live import wait_until
from workload_manager import preparation
from workload_manager import spec as instance_spec
from workload_manager.compiler import spec as compile_spec

pytestmark = pytest.mark.slow

WITHOUT_CACHE: dict[str, Any] = {"cache": {"enabled": False}, "boxes_per_replica": 0}
QUICK: dict[str, Any] = {"rollout": {"ready_seconds": 0, "deadline_seconds": 60, "warm_seconds": 5}}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as made:
        yield made


class Leader:
    """An orchestrator whose rounds a test makes, and whose clock it moves on."""

    def __init__(self, cluster: FakeCluster, redis_url: str) -> None:
        self.ahead = 0.0
        clock: Callable[[], float] = lambda: time.time() + self.ahead  # noqa: E731
        self.writer = EndpointWriter(redis_url, clock)
        self.orchestrator = Orchestrator(
            Election("test"),
            self.writer,
            lambda changed: ClusterLink(cluster.channel(), changed),
            clock,
        )

    def until(self, what: str, holds: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, (what, list(Condition.objects.values_list()))
            self.orchestrator.round()
            settle()
            self.orchestrator.wait()
            self.ahead += 0.5


@pytest.fixture
def leader(cluster: FakeCluster, redis_url: str, db: None) -> Iterator[Leader]:
    made = Leader(cluster, redis_url)
    yield made
    made.orchestrator.stop()


@pytest.fixture
def redis_url(settings: Any) -> str:
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        for key in client.scan_iter(f"{ENDPOINTS}*"):
            client.delete(key)
    return str(settings.REDIS_URL)


def told(redis_url: str, model: str = "example/chat-8b") -> dict[str, str]:
    """What brains read: addresses by replica."""
    with redis.Redis.from_url(redis_url) as client:
        raw: Any = client.get(ENDPOINTS + model)
    found = decode(raw, dict[str, Any])["endpoints"] if raw else []
    return {one["replica"]: one["url"] for one in found if one["state"] == "ready"}


def condition(kind: str) -> tuple[str, str]:
    row = Condition.objects.get(type=kind)
    return row.status, row.reason


def events(name: str) -> set[str]:
    return set(events_of(Workload.objects.get(name=name).topic).values_list("kind", flat=True))


def is_complete(name: str = "talk") -> bool:
    workload = Workload.objects.get(name=name)
    is_rolling = workload.rollouts.filter(ended_at=None).exists()
    return workload.stable_id == workload.revision_id and not is_rolling


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


def test_a_clock_that_is_set_back_holds_up_nothing(
    cluster: FakeCluster, leader: Leader, redis_url: str
) -> None:
    """Endpoints that nobody writes again are gone after 90 s."""
    make_workload(replicas=1, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    before = told(redis_url)
    leader.orchestrator.round()
    leader.ahead -= 7200.0
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"{ENDPOINTS}example/chat-8b")
    leader.until("they are written again", lambda: told(redis_url) == before)
    looked_at = leader.orchestrator._poll_at
    leader.until("it looks at which there are", lambda: leader.orchestrator._poll_at > looked_at)


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


def test_who_has_no_news_is_looked_at_in_turn(leader: Leader) -> None:
    made = leader.orchestrator
    names = [f"w-{number:03}" for number in range(90)]
    made._generations = dict.fromkeys(names, 1)
    made._looked_at = {name: float(number) for number, name in enumerate(names)}
    seen: list[str] = []
    now = 1000.0
    for _ in range(36):  # in three minutes
        found = made._longest_left(now)
        assert len(found) <= 3
        seen += found
        made._looked_at |= dict.fromkeys(found, now)
        now += 5.0
    assert seen[:90] == names
    made._looked_at = dict.fromkeys(names, now)
    assert made._longest_left(now) == []


def test_what_can_not_be_compiled_is_said_and_rolled_back(leader: Leader, redis_url: str) -> None:
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    bad = {"engine": {"kind": "emulator", "arguments": ["--no"]}}
    changes.update(SYSTEM, locked(SYSTEM), wanted(**bad, **WITHOUT_CACHE, **QUICK))
    leader.until("it is rolled back", lambda: Rollout.objects.filter(phase="undone").exists())
    assert "It has no such option." in Rollout.objects.get(phase="undone").sentence
    leader.until("it is what it was", is_complete)


def test_what_was_denied_is_compiled_with_other_credentials_and_each_instance_has_them(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    cluster.key = b"right"
    make_workload(weights={"source": "s3://models/chat"}, **WITHOUT_CACHE, **QUICK)
    bucket = stored(None, "wrong")
    denied = Condition.objects.filter(type="Compiled", status="False", message="Denied.")
    leader.until("it is denied", denied.exists)
    secrets = {**CREDENTIALS, "secret_access_key": "right"}
    buckets.replace(SYSTEM, bucket, secrets=secrets)
    leader.until("it is rolled out", is_complete)
    [name] = cluster.statuses()
    assert decode(cluster.specs[name].secrets["weights"], dict[str, str]) == secrets
    buckets.replace(SYSTEM, bucket, secrets=CREDENTIALS)
    changes.restart(SYSTEM, locked(SYSTEM))
    leader.until("it is restarted", lambda: name not in cluster.statuses() and is_complete())
    [other] = cluster.statuses()
    assert decode(cluster.specs[other].secrets["weights"], dict[str, str]) == CREDENTIALS


def test_another_leader_goes_on_where_the_first_was_killed(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    make_workload(replicas=2, **WITHOUT_CACHE, **QUICK)
    cluster.fails_apply = True
    leader.until("instances are decided", lambda: Instance.objects.count() == 2)
    names = set(Instance.objects.values_list("name", flat=True))
    cluster.fails_apply = False
    assert leader.orchestrator._link is not None
    leader.orchestrator._link.close()  # what it had in memory is gone
    other = Leader(cluster, redis_url)
    try:
        other.until("it is rolled out", is_complete)
        assert set(Instance.objects.values_list("name", flat=True)) == names
        assert len(told(redis_url)) == 2
    finally:
        other.orchestrator.stop()


def test_who_leads_next_without_a_cluster_server_tells_brains_what_they_were_told(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    make_workload(replicas=2, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    before, events_before = told(redis_url), events("talk")
    leader.orchestrator.stop()
    other = Leader(cluster, redis_url)
    other.orchestrator._make_link = lambda changed: ClusterLink(
        grpc.insecure_channel("127.0.0.1:1"), changed
    )
    try:
        other.orchestrator.round()
        assert other.orchestrator.figures.leads
        assert told(redis_url) == before
        with redis.Redis.from_url(redis_url) as client:
            client.delete(f"{ENDPOINTS}example/chat-8b")
        other.ahead += 60.0
        other.orchestrator.round()
        assert told(redis_url) == before, "they are written again, as before their 90 s are over"
    finally:
        other.orchestrator.stop()
    assert Instance.objects.filter(serving=True).count() == 2
    assert (condition("Ready"), condition("EndpointsPublished")) == (
        ("True", "Ready"),
        ("Unknown", "ClusterUnknown"),
    )
    assert events("talk") == events_before


def test_after_lost_changes_what_runs_is_kept_and_the_cluster_is_told_at_once(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    """A backup was restored, or a failover of PostgreSQL lost transactions."""
    make_workload(replicas=2, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    before = set(cluster.statuses())
    cluster.be_ahead(40, [cluster.specs[name] for name in before])
    # Who is asked for before that is refused, and replaced once the leader has heard of it.
    link = leader.orchestrator._link
    wait_until("the leader has heard of it", lambda: link and link.known("talk").generation == 40)
    scale(SYSTEM, locked(SYSTEM), 3)
    leader.until("a third one is there", lambda: len(cluster.statuses()) == 3)
    leader.until("it is complete", lambda: is_complete() and len(told(redis_url)) == 3)
    assert before < set(cluster.statuses())
    there = Instance.objects.values_list("name", "failed", "state")
    assert {name for name, *_ in there} == set(cluster.statuses()), (list(there), events("talk"))
    assert Workload.objects.get().cluster_generation > 40
    assert "workload.recovered" in events("talk")
    assert cluster.refused == []


@pytest.mark.parametrize("is_begun", [True, False], ids=["begun", "not begun"])
def test_after_lost_changes_instances_that_the_cluster_has_ended_are_replaced_once(
    leader: Leader,
    cluster: FakeCluster,
    redis_url: str,
    is_begun: bool,  # noqa: FBT001
) -> None:
    """And those that only the cluster knows are ended. Nothing has failed."""
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    [old] = cluster.statuses()
    late = pb.Instance(name="talk-0-r9-late", spec=cluster.specs[old].spec, goal=pb.RUN)
    cluster.be_ahead(40, [late])
    if not is_begun:
        Instance.objects.all().delete()
        Workload.objects.update(cluster_generation=0)
    leader.until("others are there", lambda: not {old, late.name} & set(cluster.statuses()))

    def serving() -> bool:
        addresses = {f"http://{name}:80" for name in cluster.statuses()}
        return len(addresses) == 1 and set(told(redis_url).values()) == addresses

    leader.until("another one serves, and no former one", serving)
    [new] = cluster.statuses()
    assert set(Instance.objects.values_list("name", flat=True)) == {new, *([old] if is_begun else [])}
    assert not Instance.objects.filter(failed=True).exists()
    assert "workload.instance-ended" not in events("talk")
    assert cluster.refused == []


def test_after_lost_changes_what_drains_is_drained(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    """A Cluster Server lets nothing come back from that, and would refuse whatever asks for it."""
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    [old] = cluster.statuses()
    cluster.drains_slowly = True
    draining = pb.Instance(name=old, spec=cluster.specs[old].spec, goal=pb.DRAIN)
    cluster.be_ahead(40, [draining])
    leader.until("there is another one", lambda: len(cluster.statuses()) == 2)
    assert Instance.objects.get(name=old).goal == "drain"
    cluster.say(old, state=pb.GONE)
    leader.until("it is gone", lambda: old not in cluster.statuses())
    assert not Instance.objects.filter(failed=True).exists()
    assert cluster.refused == []


def test_no_generation_of_a_cluster_ends_a_leader(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.be_ahead((1 << 64) - 1, list(cluster.specs.values()))
    leader.until("it is told in vain", lambda: cluster.refused)
    assert set(cluster.refused) == {"It is older."}
    assert leader.orchestrator.figures.led == 1


LIES: tuple[dict[str, Any], ...] = (
    {"restarts": (1 << 32) - 1},
    {"sentence": "busy", "running_requests": (1 << 32) - 1},
    {"sentence": "a\0b", "reason": "c\0d"},
    {"sentence": "x" * 5000, "reason": "y" * 5000, "host": "z" * 5000},
    {"sentence": "h", "host": "\0"},
    *({"sentence": str(at), "since": at} for at in (1e300, -1e300, float("nan"), float("inf"))),
    *({"sentence": str(at), "seen_at": at} for at in (1e18, -1e18, float("-inf"))),
    {"sentence": "p", "progress": pb.Progress(done=(1 << 64) - 1, unit="\0" * 99, seconds=1e400)},
    {"url": "http://h/" + "x" * 5000},
    {"url": "http://h\0/"},
    {"url": "gopher://h/"},
)


def test_nothing_that_a_cluster_says_ends_a_leader_or_the_endpoints_of_others(
    leader: Leader, cluster: FakeCluster, redis_url: str
) -> None:
    """It passes on what managers say, beside which engines of strangers run."""
    make_workload(replicas=2, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    name, other = cluster.statuses()
    for lie in LIES:
        decided = sum(leader.orchestrator.figures.decisions.counts)
        cluster.say(name, **lie)
        leader.until(
            "the lie was looked at",
            lambda decided=decided: sum(leader.orchestrator.figures.decisions.counts) > decided,  # type: ignore[misc]
        )
        assert leader.orchestrator.figures.led == 1, lie
        read(redis.Redis.from_url(redis_url).get(ENDPOINTS + "example/chat-8b"))  # type: ignore[arg-type]
    left = Instance.objects.get(name=other)
    leader.until("the honest one is served", lambda: told(redis_url) == {left.replica: left.url})


class BreaksOff(FakeCluster):
    """Whose first snapshot breaks off in the middle, and which then has nothing new to say."""

    def __init__(self) -> None:
        super().__init__()
        self.watches = 0

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.Event]:  # noqa: N802
        self.watches += 1
        if self.watches == 1:
            one = pb.Workload(name="chat", generation=1)
            yield pb.Event(kind=pb.Event.SNAPSHOT, version=self.version, workload=one)
            context.abort(grpc.StatusCode.UNAVAILABLE, "The connection is cut.")
        while context.is_active() and request.since_version == self.version:
            time.sleep(0.05)
        yield from super().Watch(request, context)


def test_a_watch_that_breaks_off_is_heard_of_again_also_if_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a leader would think for good that nothing is known, and begin nothing."""
    monkeypatch.setattr("console.workloads.leader.cluster.STALE_SECONDS", 0.0)
    with FakeCluster() as cluster:
        link = ClusterLink(cluster.channel(), lambda _: None)
        link.open()
        try:
            wait_until("all of it is known", lambda: not link.is_stale)
            link._call.cancel()
            wait_until("it watches again", lambda: cluster.watches == 2)
            wait_until("it is known again", lambda: not link.is_stale)
        finally:
            link.close()


def test_a_snapshot_that_breaks_off_begins_again() -> None:
    with BreaksOff() as cluster:
        for name in ("chat", "talk"):
            cluster.workloads[name] = pb.Workload(name=name, generation=1)
        link = ClusterLink(cluster.channel(), lambda _: None)
        link.open()
        try:
            wait_until("all of it is known", lambda: not link.is_stale)
            assert link.names() == {"chat", "talk"}
        finally:
            link.close()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload `bad` that can't be loaded."""
    load = store.load

    def fails(name: str) -> store.Loaded | None:
        if name == "bad":
            raise Malformed("It is not what it should be.")
        return load(name)

    monkeypatch.setattr(store, "load", fails)


def test_one_that_can_not_be_looked_after_keeps_nobody_from_looking_after_others(
    leader: Leader, poisoned: None
) -> None:
    make_workload(name="bad", model="example/bad", **WITHOUT_CACHE, **QUICK)
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("the other is rolled out", is_complete)
    assert leader.orchestrator.figures.faults["workload"] >= 1
    assert not Instance.objects.filter(workload__name="bad").exists()


def test_a_session_that_has_gone_is_made_anew(leader: Leader) -> None:
    """It waited in vain for boxes, or somebody cancelled it."""
    make_fleet(boxes=1)
    others = make_workload(name="other", model="example/other", **QUICK)
    changes.create(SYSTEM, wanted(**QUICK), wait_seconds=60)
    unready = Condition.objects.filter(workload__name="talk", type="SessionReady", status="False")
    leader.until("it waits", unready.exists)
    Operation.objects.filter(target="session:talk").update(
        created_at=timezone.now() - timedelta(hours=1)
    )
    leader.until("it waits anew", lambda: Operation.objects.filter(target="session:talk").count() > 1)
    changes.delete(SYSTEM, locked(SYSTEM, others.name))
    leader.until("it has the box", lambda: SessionBox.objects.filter(session__name="talk").exists())
    assert Workload.objects.get(name="talk").session


def test_a_name_of_a_model_that_is_used_again_keeps_its_endpoints(
    leader: Leader, redis_url: str
) -> None:
    """By a workload whose predecessor has let it go, and is not gone itself."""
    new = make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it serves", lambda: told(redis_url))
    seen = told(redis_url)
    old = a_workload(name="old", model=new.model, deleting=True)
    leader.orchestrator._look_at(old.name)
    assert told(redis_url) == seen
    leader.orchestrator._forget(old.name)
    assert told(redis_url) == seen


def test_a_driver_of_somebody_else_is_not_taken_for_its_own(leader: Leader) -> None:
    """Whatever it is called: of a workload that is deleted only its own drivers are removed."""
    make_fleet(boxes=4)
    make_driver("talk-1-0")
    make_workload(**QUICK)
    leader.until("it has an instance", Instance.objects.exists)
    changes.delete(SYSTEM, locked(SYSTEM))
    leader.until("it is gone", lambda: not Workload.objects.exists())
    assert Driver.objects.filter(name="talk-1-0").exists()


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


@pytest.mark.parametrize(
    "result",
    [
        b'{"sha256": 12, "layout": null}',
        b'{"sha256": "' + b"a" * 5000 + b'"}',
        b'{"sha256": "' + b"a" * 64 + b'", "layout": "none"}',
        b'{"sha256": "' + b"a" * 64 + b'", "layout": {"a": "\\u0000"}}',
        b'{"sha256": "' + b"a" * 64 + b'", "layout": {"\\u0000": 1}}',
    ],
)
def test_no_result_of_a_compile_job_ends_a_leader(
    leader: Leader, cluster: FakeCluster, redis_url: str, result: bytes
) -> None:
    cluster.result = result
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is refused", lambda: condition("Ready")[1] == "CompileFailed")
    assert leader.orchestrator.figures.led == 1


def test_a_redis_that_refuses_endpoints_is_not_one_that_is_away(
    cluster: FakeCluster, redis_url: str, db: None
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        rights = ("reset", "on", ">half", "resetchannels", "-@all", "+ping")
        client.execute_command("ACL", "SETUSER", "half", *rights)
        place = urlsplit(redis_url)
        at = f"half:half@{place.netloc.rpartition('@')[2]}"
        leader = Leader(cluster, urlunsplit(place._replace(netloc=at)))
        make_workload(replicas=1, **WITHOUT_CACHE, **QUICK)
        refused = ("False", "RedisRefuses")
        leader.until("it is said", lambda: _has("EndpointsPublished", refused))
        assert "to the user half" in Condition.objects.get(type="EndpointsPublished").message
        client.execute_command("ACL", "SETUSER", "half", "allkeys", "allchannels", "+@all")
        leader.until("it is rolled out", is_complete)
        client.execute_command("ACL", "DELUSER", "half")
    leader.orchestrator.stop()


def _has(kind: str, wanted: tuple[str, str]) -> bool:
    found = Condition.objects.filter(type=kind).values_list("status", "reason")
    return wanted in set(found)


def test_a_deleted_workload_leaves_nothing(leader: Leader, cluster: FakeCluster, redis_url: str) -> None:
    make_workload(replicas=2, **WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    changes.delete(SYSTEM, locked(SYSTEM))
    leader.until("it is gone", lambda: not Workload.objects.exists())
    leader.until("brains know nothing of it", lambda: not told(redis_url))
    assert not cluster.workloads
    assert not ServedModel.objects.exists()


def test_a_deletion_waits_for_no_driver_that_has_ended(
    cluster: FakeCluster, leader: Leader, redis_url: str
) -> None:
    """The start of its job waits for minutes until its driver has its streams; the driver ends first."""
    cluster.layout = {"name": "chat", "groups": []}
    make_fleet(boxes=4)
    make_workload(**QUICK)
    leader.until("an instance is applied", lambda: len(cluster.statuses()) == 1)
    [name] = cluster.statuses()
    make_driver("talk-1-0", workload="talk")
    cluster.say(name, state=pb.READY, cache=pb.WAITING, url="http://here:80")
    with obeying(), mock.patch.object(Obeying, "shard_of", return_value=None):
        starts = Operation.objects.filter(kind=START_JOB)
        leader.until("its driver is waited for", lambda: starts.filter(step=2).exists())
        changes.delete(SYSTEM, locked(SYSTEM))
        leader.until("it is gone", lambda: not Workload.objects.exists())
    assert starts.get().state == "cancelled"
    assert not Driver.objects.exists()
    assert not Session.objects.exists()


@pytest.mark.parametrize("method", ["Get", "Apply", "Delete"])
def test_others_are_looked_after_while_the_cluster_does_not_answer_about_one(
    leader: Leader, cluster: FakeCluster, redis_url: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Rounds don't wait for an answer: of a compile job, of what is applied, of a deletion."""
    monkeypatch.setattr("console.workloads.leader.cluster.CALL_SECONDS", 3600.0)
    cluster.silent = method, "talk"
    make_workload(**WITHOUT_CACHE, **QUICK)
    if method == "Delete":
        leader.until("it is rolled out", is_complete)
        changes.delete(SYSTEM, locked(SYSTEM))
    leader.until("it does not answer", cluster.asked_in_vain.is_set)
    make_workload(name="other", model="example/other", **WITHOUT_CACHE, **QUICK)
    leader.until("the other one is rolled out", lambda: is_complete("other"))
    assert told(redis_url, "example/other")
    assert Workload.objects.filter(name="talk").exists()
    cluster.answers.set()
    if method == "Delete":
        leader.until("it is gone", lambda: not Workload.objects.filter(name="talk").exists())
    else:
        leader.until("it is rolled out", is_complete)


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


def test_an_instance_is_made_when_its_session_has_boxes_not_when_they_are_reserved(
    cluster: FakeCluster, leader: Leader
) -> None:
    """An instance without boxes would have a job without boxes, which takes what others need."""
    cluster.layout = {"name": "chat", "groups": []}
    make_fleet(boxes=2)
    make_workload(**QUICK)
    boxes = SessionBox.objects.all()
    boxes.update(ready=False)
    compiled = Condition.objects.filter(type="Compiled", status="True")
    leader.until("it is compiled", compiled.exists)
    assert condition("SessionReady")[0] == "False"
    _rest(leader)
    assert not Instance.objects.exists()
    boxes.update(ready=True)
    leader.until("an instance is applied", lambda: len(cluster.statuses()) == 1)
    assert Instance.objects.get().boxes == boxes_of_session()


def test_a_replica_without_a_cache_waits_for_a_box_of_its_own(
    cluster: FakeCluster, leader: Leader
) -> None:
    make_fleet(boxes=4)
    make_workload(replicas=2, cache={"enabled": False}, **QUICK)
    late = SessionBox.objects.order_by("box__name").last()
    assert late is not None
    SessionBox.objects.update(ready=False)
    compiled = Condition.objects.filter(type="Compiled", status="True")
    leader.until("it is compiled", compiled.exists)
    _rest(leader)
    assert not Instance.objects.exists()
    SessionBox.objects.exclude(pk=late.pk).update(ready=True)
    leader.until("an instance is applied", lambda: len(cluster.statuses()) == 1)
    _rest(leader)
    assert Instance.objects.count() == 1, "two replicas on one box"
    row = Condition.objects.get(type="SessionReady")
    assert (row.status, row.message) == ("False", "Its session has 1 of 2 boxes.")
    SessionBox.objects.update(ready=True)
    leader.until("both are applied", lambda: len(cluster.statuses()) == 2)
    assert len(_boxes_of_instances()) == 2
    assert condition("SessionReady") == ("True", "Granted")


def test_each_replica_without_a_cache_is_on_its_own_box_after_a_rollout(
    cluster: FakeCluster, leader: Leader
) -> None:
    make_fleet(boxes=4)
    _serve_without_cache(cluster, leader, replicas=2)
    before = _boxes_of_instances()
    changes.restart(SYSTEM, locked(SYSTEM))

    new = Instance.objects.filter(restart=1, ended_at=None)
    leader.until("both are new", lambda: new.count() == 2)
    leader.until("it is rolled out", is_complete)
    assert _boxes_of_instances() == before, "two replicas on one box"


def _rest(leader: Leader) -> None:
    for _ in range(5):
        leader.orchestrator.round()
        settle()
        leader.ahead += 5.0


def test_replicas_without_a_cache_return_their_boxes_when_there_are_fewer(
    cluster: FakeCluster, leader: Leader, redis_url: str
) -> None:
    make_fleet(boxes=4)
    _serve_without_cache(cluster, leader, replicas=3)
    assert len(boxes_of_session()) == 3
    scale(SYSTEM, locked(SYSTEM), 1)
    leader.until("one is left", lambda: len(cluster.statuses()) == 1)
    leader.until("its session returns the others", lambda: len(boxes_of_session()) == 1)
    assert boxes_of_session() == Instance.objects.get(ended_at=None).boxes
    scale(SYSTEM, locked(SYSTEM), 2)
    leader.until("there are two again", lambda: len(cluster.statuses()) == 2)
    assert len(boxes_of_session()) == 2


@pytest.mark.parametrize("at_once", [False, True])
def test_replicas_without_a_cache_keep_boxes_on_which_a_rollout_goes_on(
    cluster: FakeCluster, leader: Leader, *, at_once: bool
) -> None:
    """The new instance is on a box that another replica has left, since its own one is drained."""
    make_fleet(boxes=4)
    _serve_without_cache(cluster, leader, replicas=3)
    cluster.drains_slowly = True
    scale(SYSTEM, locked(SYSTEM), 1)
    leader.until("two drain", lambda: len(_draining(cluster)) == 2)
    first, last = _draining(cluster)
    cluster.say(first, state=pb.GONE)
    leader.until("the first is gone", lambda: first not in cluster.statuses())
    [stays] = cluster.statuses().keys() - {last}
    [drained] = cluster.specs[stays].boxes
    box_drains.drain(SYSTEM, drained, reason="A loud fan.")
    settle()
    changes.restart(SYSTEM, locked(SYSTEM))
    if not at_once:
        leader.until("a new one is applied", lambda: len(cluster.statuses()) == 3)
    cluster.say(last, state=pb.GONE)
    link = leader.orchestrator._link
    assert link
    wait_until("it is heard of", lambda: link.known("talk").statuses[last].state is State.GONE)
    leader.until("the last is gone", lambda: last not in cluster.statuses())
    leader.until("a new one is applied", lambda: len(cluster.statuses()) == 2)
    for _ in range(3):
        leader.orchestrator.round()
        settle()
        leader.ahead += 5.0
    held = _boxes_of_instances()
    assert len(held) == 2
    assert held - {drained} <= {*boxes_of_session()}
    waiting = Operation.objects.filter(done=False).exclude(kind="box.drain")
    assert not waiting.exists(), "a resize that waits keeps others from it"
    _serve_all(cluster)
    leader.until("the old one drains", lambda: len(_draining(cluster)) == 1)
    [old] = _draining(cluster)
    cluster.say(old, state=pb.GONE)
    leader.until("its session returns the others", lambda: len(boxes_of_session()) == 1)
    assert {*boxes_of_session()} == _boxes_of_instances()


def _draining(cluster: FakeCluster) -> list[str]:
    return sorted(name for name, one in cluster.statuses().items() if one.state == pb.DRAINING)


def _serve_without_cache(cluster: FakeCluster, leader: Leader, *, replicas: int, **more: Any) -> None:
    """A workload without a cache, all of whose replicas serve."""
    make_workload(**{**QUICK, "replicas": replicas, "cache": {"enabled": False}, **more})
    leader.until("instances are applied", lambda: len(cluster.statuses()) == replicas)
    _serve_all(cluster)
    leader.until("it is rolled out", is_complete)


def _serve_all(cluster: FakeCluster) -> None:
    for name, one in cluster.statuses().items():
        if one.state != pb.DRAINING:
            cluster.say(name, state=pb.READY, cache=pb.NO_CACHE, url=f"http://{name}:80")


def _boxes_of_instances() -> set[str]:
    return {box for one in Instance.objects.filter(ended_at=None) for box in one.boxes}


def test_a_replica_leaves_a_box_that_is_drained(
    cluster: FakeCluster, leader: Leader, redis_url: str
) -> None:
    """The next instance has another box, and its job runs there before the old one ends."""
    cluster.layout = {"name": "chat", "groups": []}
    make_fleet(boxes=3)
    make_workload(rollout={**QUICK["rollout"], "warm_seconds": 120})
    leader.until("an instance is applied", lambda: len(cluster.statuses()) == 1)
    [old] = cluster.statuses()
    make_driver("talk-1-0", workload="talk")
    cluster.say(old, state=pb.READY, cache=pb.WAITING, url="http://old:80")
    with obeying():
        leader.until("its job runs", lambda: Job.objects.filter(running=True).exists())
        cluster.say(old, cache=pb.ATTACHED)
        leader.until("it is rolled out", is_complete)
        [left] = boxes_of_jobs()
        assert list(cluster.specs[old].boxes) == [left]

        drained = box_drains.drain(SYSTEM, left, reason="A loud fan.")
        leader.until("a new one is applied", lambda: len(cluster.statuses()) == 2)
        assert condition("RolloutComplete") == ("False", "LeavingBoxes")
        drained.refresh_from_db()
        assert drained.message == "Workload talk moves job talk-1-0 to another box."
        [new] = cluster.statuses().keys() - {old}
        assert list(cluster.specs[new].boxes) != [left]
        cluster.say(new, state=pb.STANDBY, cache=pb.WAITING, url="http://new:80")
        leader.until("the job is on its box", lambda: boxes_of_jobs() == list(cluster.specs[new].boxes))
        assert told(redis_url) == {"talk-0": "http://old:80"}
        cluster.say(old, cache=pb.RELEASED)
        cluster.say(new, state=pb.READY, cache=pb.ATTACHED)
        leader.until("brains are told", lambda: told(redis_url) == {"talk-0": "http://new:80"})
        leader.until("the old one is gone", lambda: old not in cluster.statuses())
        leader.until("the box is left", lambda: operation_ended(drained))
        leader.until("its session is as large as before", lambda: len(boxes_of_session()) == 1)
        assert left not in boxes_of_session()
        leader.until("it is said", lambda: condition("RolloutComplete") == ("True", "Complete"))
    assert Rollout.objects.count() == 1, "nothing was rolled out"


def test_a_replica_without_a_cache_leaves_a_box_that_is_drained(
    cluster: FakeCluster, leader: Leader
) -> None:
    make_fleet(boxes=4)
    _serve_without_cache(cluster, leader, replicas=2)
    _rest(leader)
    old = min(cluster.statuses())
    [left] = cluster.specs[old].boxes
    cluster.drains_slowly = True
    with obeying():
        drained, before = box_drains.drain(SYSTEM, left, reason="A loud fan."), leader.ahead
        leader.until("a new one is applied", lambda: len(cluster.statuses()) == 3)
        assert leader.ahead - before < 3 * orchestrator.POLL_SECONDS, "nobody has told the leader"
        assert condition("RolloutComplete") == ("False", "LeavingBoxes")
        _serve_all(cluster)
        leader.until("the old one drains", lambda: _draining(cluster) == [old])
        assert not operation_ended(drained)
        assert drained.message == "Workload talk moves its instances to another box."
        cluster.say(old, state=pb.GONE)
        leader.until("the box is left", lambda: operation_ended(drained))
    assert left not in _boxes_of_instances()
    assert _boxes_of_instances() == {*boxes_of_session()}
    assert len(_boxes_of_instances()) == 2


def test_replicas_without_a_cache_leave_one_of_their_boxes_for_the_only_other_one(
    cluster: FakeCluster, leader: Leader
) -> None:
    make_fleet(boxes=5)
    _serve_without_cache(cluster, leader, replicas=2, boxes_per_replica=2)
    old = min(cluster.statuses())
    left, stays = cluster.specs[old].boxes
    with obeying():
        drained = box_drains.drain(SYSTEM, left, reason="A loud fan.")
        leader.until("a new one is applied", lambda: len(cluster.statuses()) == 3)
        _serve_all(cluster)
        leader.until("the box is left", lambda: operation_ended(drained))
    [new] = Instance.objects.filter(ended_at=None, ordinal=Instance.objects.get(name=old).ordinal)
    assert stays in new.boxes
    assert _boxes_of_instances() == {*boxes_of_session()}
    assert len(_boxes_of_instances()) == 4


def test_replicas_without_a_cache_leave_two_boxes_in_place_one_after_the_other(
    cluster: FakeCluster, leader: Leader
) -> None:
    make_fleet(boxes=4)
    rollout = {**QUICK["rollout"], "max_surge": 0, "max_unavailable": 1}
    _serve_without_cache(cluster, leader, replicas=2, rollout=rollout)
    both = [cluster.specs[name].boxes[0] for name in cluster.statuses()]
    with obeying():
        drains = [box_drains.drain(SYSTEM, left, reason="A loud fan.") for left in both]

        def are_left() -> bool:
            for one in Instance.objects.filter(goal="run", ended_at=None):
                if one.name in cluster.statuses():
                    cluster.say(one.name, state=pb.READY, cache=pb.NO_CACHE, url=f"http://{one.name}:80")
            return all(map(operation_ended, drains))

        leader.until("both boxes are left", are_left)
    assert not {*both} & _boxes_of_instances()
    assert len(_boxes_of_instances()) == 2


def test_a_drain_that_is_begun_again_waits_for_who_is_still_there(
    cluster: FakeCluster, leader: Leader
) -> None:
    """The first one has given the session another box, and was cancelled then."""
    make_fleet(boxes=3)
    _serve_without_cache(cluster, leader, replicas=1)
    [old] = cluster.statuses()
    [left] = cluster.specs[old].boxes
    cluster.drains_slowly = True
    with obeying():
        first = box_drains.drain(SYSTEM, left, reason="A loud fan.")
        settle()
        assert left not in boxes_of_session()
        operations.cancel(SYSTEM, first.pk)
        settle()
        again = box_drains.drain(SYSTEM, left, reason="It is loud again.")
        settle()
        assert not operation_ended(again)
        assert again.message == "Workload talk moves its instances to another box."
        leader.until("a new one is applied", lambda: len(cluster.statuses()) == 2)
        _serve_all(cluster)
        leader.until("the old one drains", lambda: _draining(cluster) == [old])
        cluster.say(old, state=pb.GONE)
        leader.until("the box is left", lambda: operation_ended(again))
    assert again.message == f"No session has {left}."


def test_a_box_that_a_cancelled_drain_has_replaced_is_left_at_once(
    cluster: FakeCluster, leader: Leader
) -> None:
    make_fleet(boxes=3)
    _serve_without_cache(cluster, leader, replicas=1)
    _rest(leader)
    [old] = cluster.statuses()
    [left] = cluster.specs[old].boxes
    with obeying():
        drained, before = box_drains.drain(SYSTEM, left, reason="A loud fan."), leader.ahead
        settle()
        operations.cancel(SYSTEM, drained.pk)
        settle()
        assert left not in boxes_of_session()
        leader.until("a new one is applied", lambda: len(cluster.statuses()) == 2)
        assert leader.ahead - before < 3 * orchestrator.POLL_SECONDS, "nobody has told the leader"
        _serve_all(cluster)
        leader.until("the old one is gone", lambda: old not in cluster.statuses())
    assert _boxes_of_instances() == {*boxes_of_session()}


def boxes_of_jobs() -> list[str]:
    names = Job.objects.values_list("boxes__session_box__box__name", flat=True)
    return sorted(name for name in names if name)


def boxes_of_session() -> list[str]:
    return list(Session.objects.get().boxes.values_list("box__name", flat=True))


def operation_ended(operation: Operation) -> bool:
    operation.refresh_from_db()
    return operation.state == "succeeded"


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


def test_what_failed_is_compiled_again_for_an_equal_revision_and_after_a_restart(db: None) -> None:
    make_fleet(boxes=4)
    workload = make_workload(**QUICK)
    revision = workload.revisions.get()
    names = {rendering.compile_name(revision)}
    revision.workload.restarts += 1
    names.add(rendering.compile_name(revision))
    revision.made_at += timedelta(seconds=1)  # as one with the same number after a database was restored
    names.add(rendering.compile_name(revision))
    assert len(names) == 3


def test_a_compile_job_is_told_what_the_largest_box_has_once_all_boxes_say_it(db: None) -> None:
    make_fleet(boxes=2)
    workload = make_workload(**QUICK)
    revision = workload.revisions.get()

    def told() -> int | None:
        return compile_spec.parse(rendering.compile_spec(workload, revision)).box_memory_bytes

    assert told() is None
    [first, second] = Box.objects.all()
    Box.objects.filter(pk=first.pk).update(memory_bytes=44 << 30)
    assert told() is None
    Box.objects.filter(pk=second.pk).update(memory_bytes=22 << 30)
    assert told() == 44 << 30
    Revision.objects.filter(pk=revision.pk).update(epoch=1, artifact="a" * 64, layout={"groups": []})
    instance = an_instance(workload, boxes=["cs1"], revision=workload.revisions.get())
    job = preparation.compile_job(instance_spec.parse(rendering.instance_spec(workload, instance)))
    asked = compile_spec.parse(rendering.compile_spec(workload, revision))
    assert job.inputs({}) == asked.inputs({}), "a manager looks where the compile job has put it"


INTERRUPTIONS: tuple[dict[str, Any], ...] = (
    {"state": pb.JOB_FAILED, "reason": "PodGone", "sentence": "Its pod was deleted by others."},
    {"state": pb.JOB_CANCELLED, "reason": "Cancelled", "sentence": "It was cancelled."},
    {"state": pb.JOB_FAILED, "reason": "Unreachable", "sentence": "s3://b can't be reached."},
)


def test_a_compile_job_that_others_have_ended_is_no_fault_of_the_revision(
    leader: Leader, cluster: FakeCluster
) -> None:
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.is_slow = True
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    for count, interruption in enumerate(INTERRUPTIONS, 2):
        leader.until("it is compiled", lambda count=count: len(cluster.jobs) == count)  # type: ignore[misc]
        job = list(cluster.jobs.values())[-1]
        for name, value in {**interruption, "ended_at": time.time() + leader.ahead}.items():
            setattr(job, name, value)
        again = f"Revision 2 is compiled again in a moment: {interruption['sentence']}"
        leader.until("it is said", Condition.objects.filter(type="Compiled", message=again).exists)
        assert len(cluster.jobs) == count, "not before a while"
        leader.ahead += 60.0
    cluster.is_slow = False
    leader.until("it is rolled out", lambda: Workload.objects.get().stable.number == 2)  # type: ignore[union-attr]
    assert not Rollout.objects.filter(phase="undone").exists()


def test_a_compile_job_that_is_ended_time_and_again_is_given_up(
    leader: Leader, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilations, "ATTEMPTS_MAX", 2)
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.is_slow = True
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    for count in (2, 3):
        leader.until("it is compiled", lambda count=count: len(cluster.jobs) == count)  # type: ignore[misc]
        job = list(cluster.jobs.values())[-1]
        job.state, job.reason, job.sentence = pb.JOB_FAILED, "Evicted", "Its node has no memory left."
    leader.until("it is rolled back", lambda: Workload.objects.get().revision.number == 3)  # type: ignore[union-attr]
    undone = Rollout.objects.get(phase="undone")
    assert undone.sentence == "It could not be compiled: Its node has no memory left."


def test_a_compile_job_that_takes_too_long_is_the_fault_of_the_revision(
    leader: Leader, cluster: FakeCluster
) -> None:
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("it is rolled out", is_complete)
    cluster.is_slow = True
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=1000, **WITHOUT_CACHE, **QUICK))
    leader.until("it is compiled", lambda: len(cluster.jobs) == 2)
    job = list(cluster.jobs.values())[-1]
    job.state, job.reason, job.sentence = pb.JOB_FAILED, "DeadlineExceeded", "It took too long."
    leader.until("it is rolled back", lambda: Workload.objects.get().revision.number == 3)  # type: ignore[union-attr]
    assert len(cluster.jobs) == 2, "an hour is not tried five times"


def test_a_compile_job_that_nobody_waits_for_is_cancelled(leader: Leader, cluster: FakeCluster) -> None:
    cluster.is_slow = True
    workload = make_workload(**WITHOUT_CACHE, **QUICK)
    first = rendering.compile_name(workload.revisions.get())
    leader.until("it compiles", lambda: first in cluster.jobs)
    changes.update(SYSTEM, locked(SYSTEM), wanted(tokens_max=999, **WITHOUT_CACHE, **QUICK))
    leader.until("it is cancelled", lambda: cluster.jobs[first].state == pb.JOB_CANCELLED)
    second = rendering.compile_name(Workload.objects.get().revisions.latest("number"))
    assert second != first
    leader.until("the next one compiles", lambda: second in cluster.jobs)
    assert cluster.jobs[second].state == pb.JOB_RUNNING
    changes.delete(SYSTEM, locked(SYSTEM))
    leader.until("that ends too", lambda: cluster.jobs[second].state == pb.JOB_CANCELLED)
    leader.until("it is gone", lambda: not Workload.objects.exists())


def test_the_same_inputs_are_not_compiled_again(leader: Leader, cluster: FakeCluster) -> None:
    made = []
    for _ in range(2):
        workload = make_workload(**WITHOUT_CACHE, **QUICK)
        leader.until("it is rolled out", is_complete)
        made.append(workload.revisions.get().artifact)
        changes.delete(SYSTEM, locked(SYSTEM))
        leader.until("it is gone", lambda: not Workload.objects.exists())
    assert made[0] == made[1]
    assert len(cluster.jobs) == 1


def test_two_never_lead_and_who_has_lost_its_connection_does_not_act(db: None) -> None:
    election = Election("two")
    assert election.run()
    assert election.run()
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted")
        assert cursor.fetchone()[0] >= 1
