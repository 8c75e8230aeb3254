"""What a deleted workload leaves: nothing of its own, and all that is of others."""

from __future__ import annotations

from unittest import mock

import pytest

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.fleet.models import Driver
from console.operations.models import Operation
from console.routing.models import ServedModel
from console.sessions.models import Session
from console.workloads import changes
from console.workloads.leader.loaded import START_JOB
from console.workloads.models import Instance, Workload
from tests.console.sessions.fleets import make_driver, make_fleet
from tests.console.sessions.obeying import Obeying, obeying
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.leader.leaders import QUICK, WITHOUT_CACHE, Leader, is_complete, told
from tests.console.workloads.workloads import a_workload, locked, make_workload

pytestmark = pytest.mark.slow


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
