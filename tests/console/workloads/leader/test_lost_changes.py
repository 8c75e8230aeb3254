"""A cluster that is ahead of the console: a backup was restored, or a failover lost transactions."""

from __future__ import annotations

import pytest

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.workloads.models import Instance, Workload
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.leader.leaders import (
    QUICK,
    WITHOUT_CACHE,
    Leader,
    events,
    is_complete,
    told,
)
from tests.console.workloads.workloads import locked, make_workload, scale
from tests.live import wait_until

pytestmark = pytest.mark.slow


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
