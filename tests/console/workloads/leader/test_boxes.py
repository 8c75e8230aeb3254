"""Which boxes instances are on, and how they leave them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.fleet.models import Box
from console.operations import services as operations
from console.operations.models import Operation
from console.placement.topology import State as BoxState
from console.sessions.changes import box_drains
from console.sessions.models import Job, Session, SessionBox
from console.workloads import changes
from console.workloads.leader import orchestrator
from console.workloads.leader.world import State
from console.workloads.models import Condition, Instance, Rollout, Workload
from tests.console.sessions.fleets import make_driver, make_fleet
from tests.console.sessions.obeying import obeying
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.leader.leaders import QUICK, Leader, condition, is_complete, told
from tests.console.workloads.workloads import locked, make_workload, scale, settle, wanted
from tests.live import wait_until

pytestmark = pytest.mark.slow


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


def test_a_drain_says_that_too_few_boxes_are_free(cluster: FakeCluster, leader: Leader) -> None:
    cluster.layout = {"name": "chat", "groups": []}
    make_fleet(boxes=1)
    make_workload(**QUICK)
    leader.until("an instance is applied", lambda: len(cluster.statuses()) == 1)
    [old] = cluster.statuses()
    make_driver("talk-1-0", workload="talk")
    cluster.say(old, state=pb.READY, cache=pb.WAITING, url="http://old:80")
    with obeying():
        leader.until("its job runs", lambda: Job.objects.filter(running=True).exists())
        cluster.say(old, cache=pb.ATTACHED)
        leader.until("it is rolled out", is_complete)
        drained = box_drains.drain(SYSTEM, boxes_of_jobs()[0], reason="A loud fan.")
        leader.until("it can't leave", lambda: condition("RolloutComplete") == ("False", "TooFewBoxes"))

        def message() -> str:
            settle()
            return Operation.objects.get(pk=drained.pk).message

        leader.until("it is said", lambda: "as soon as" in message())
    said = "Workload talk moves job talk-1-0 to another box as soon as enough boxes are free."
    assert message() == said


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


def test_boxes_to_leave_are_those_that_drain_and_those_that_its_session_has_lost(
    cluster: FakeCluster, leader: Leader
) -> None:
    make_fleet(boxes=2)
    _serve_without_cache(cluster, leader, replicas=1)
    found = leader.orchestrator._with_boxes_to_leave
    [box] = _boxes_of_instances()
    assert found() == set()
    Box.objects.filter(name=box).update(state=BoxState.DRAINING.value)
    assert found() == {"talk"}
    Box.objects.filter(name=box).update(state=BoxState.READY.value)
    assert found() == set()
    SessionBox.objects.filter(box__name=box).delete()
    assert found() == {"talk"}


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


def _rest(leader: Leader) -> None:
    for _ in range(5):
        leader.orchestrator.round()
        settle()
        leader.ahead += 5.0


def _draining(cluster: FakeCluster) -> list[str]:
    return sorted(name for name, one in cluster.statuses().items() if one.state == pb.DRAINING)


def _boxes_of_instances() -> set[str]:
    return {box for one in Instance.objects.filter(ended_at=None) for box in one.boxes}


def boxes_of_jobs() -> list[str]:
    names = Job.objects.values_list("boxes__session_box__box__name", flat=True)
    return sorted(name for name in names if name)


def boxes_of_session() -> list[str]:
    return list(Session.objects.get().boxes.values_list("box__name", flat=True))


def operation_ended(operation: Operation) -> bool:
    operation.refresh_from_db()
    return operation.state == "succeeded"
