"""The leader with PostgreSQL, Redis and a Cluster Server that speaks the real protocol.

Who leads, and what must not end that. What it does for workloads is tested beside this."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import grpc
import pytest
import redis
from django.db import connection

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.workloads import changes
from console.workloads.leader.cluster import ClusterLink
from console.workloads.leader.election import Election
from console.workloads.leader.loaded import Loaded, load
from console.workloads.models import Condition, Instance, Workload
from inference_brain.endpoints import read
from telemetry.decoder import Malformed
from telemetry.records import ENDPOINTS
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
from tests.console.workloads.workloads import locked, make_workload

pytestmark = pytest.mark.slow


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


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload `bad` that can't be loaded."""

    def fails(name: str) -> Loaded | None:
        if name == "bad":
            raise Malformed("It is not what it should be.")
        return load(name)

    monkeypatch.setattr("console.workloads.leader.orchestrator.load", fails)


def test_one_that_can_not_be_looked_after_keeps_nobody_from_looking_after_others(
    leader: Leader, poisoned: None
) -> None:
    make_workload(name="bad", model="example/bad", **WITHOUT_CACHE, **QUICK)
    make_workload(**WITHOUT_CACHE, **QUICK)
    leader.until("the other is rolled out", is_complete)
    assert leader.orchestrator.figures.faults["workload"] >= 1
    assert not Instance.objects.filter(workload__name="bad").exists()


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


def test_two_never_lead_and_who_has_lost_its_connection_does_not_act(db: None) -> None:
    election = Election("two")
    assert election.run()
    assert election.run()
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted")
        assert cursor.fetchone()[0] >= 1
