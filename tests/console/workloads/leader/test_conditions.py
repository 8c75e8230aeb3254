"""What people read while a replica is not ready, or a rollout waits: the reason, and what helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from console.workloads.leader.conditions import conditions
from console.workloads.leader.decisions import decide
from console.workloads.leader.replicas import Replica
from console.workloads.leader.world import (
    Cache,
    Condition,
    Create,
    Endpoint,
    Goal,
    HomeSeen,
    Instance,
    Intent,
    Remove,
    Revision,
    Seen,
    SessionSeen,
    State,
)
from console.workloads.spec import RolloutSpec

OLD = Revision(number=1, digest="a" * 64, epoch=1)
NEW = Revision(number=2, digest="b" * 64, epoch=1)
COLD = replace(NEW, epoch=2)
CHAT = Intent(name="chat", replicas=1, revision=NEW, stable=OLD, rules=RolloutSpec())
SERVING = Instance(
    name="chat-0-r1-aaaa",
    ordinal=0,
    revision=OLD,
    state=State.READY,
    cache=Cache.ATTACHED,
    url="http://10.0.0.1:1",
)
WAITING = Instance(
    name="chat-0-r2-bbbb",
    ordinal=0,
    revision=NEW,
    state=State.STANDBY,
    url="http://10.0.0.1:2",
    reason="WaitingForCache",
    sentence="The engine answers, and waits for its cache.",
)


def told(intent: Intent, replica: Replica, *, serves: bool, **seen: Any) -> dict[str, Condition]:
    endpoints = (
        [Endpoint(ordinal=0, instance=SERVING.name, url=SERVING.url, is_draining=False, since=0.0)]
        if serves
        else []
    )
    found = conditions(intent, Seen(**seen), [replica], endpoints, None, is_complete=False)
    return {one.type: one for one in found}


def test_a_first_instance_waits_for_its_driver_and_for_no_other_instance() -> None:
    first = told(CHAT, Replica(0, heir=WAITING), serves=False)["InstancesReady"]
    assert (first.status, first.reason) == (False, "WaitingForCache")
    assert first.message == (
        "0 of 1 are ready. The engine of chat-0-r2-bbbb answers; its driver is being started."
    )


def test_an_heir_says_whose_cache_it_waits_for() -> None:
    leaving = replace(SERVING, goal=Goal.DRAIN)
    second = told(CHAT, Replica(0, heir=WAITING, draining=[leaving]), serves=False)["InstancesReady"]
    assert second.message.endswith("waits until chat-0-r1-aaaa has let go of the cache.")
    elsewhere = replace(leaving, revision=replace(OLD, epoch=7))
    other = told(CHAT, Replica(0, heir=WAITING, draining=[elsewhere]), serves=False)["InstancesReady"]
    assert other.message.endswith("its driver is being started.")


def test_a_cold_rollout_without_boxes_says_so_and_what_helps() -> None:
    intent, replica = replace(CHAT, revision=COLD), Replica(0, rest=[SERVING], owner=SERVING)
    lacking = told(intent, replica, serves=True, session=SessionSeen(boxes=2, granted=1))
    assert lacking["SessionReady"].message == "Its session has 1 box."
    rollout = lacking["RolloutComplete"]
    assert (rollout.status, rollout.reason) == (False, "WaitingForBoxes")
    assert rollout.message.startswith("0 of 1 replicas run revision 2. It waits for 1 box: ")
    assert "rollout.max_surge to 0" in rollout.message
    has_it = told(intent, replica, serves=True, session=SessionSeen(boxes=2, granted=2))
    assert has_it["RolloutComplete"].reason == "RollingOut"
    # More replicas wait for boxes, too: that is the session's condition.
    scaled = told(
        replace(intent, replicas=2), replica, serves=True, session=SessionSeen(boxes=2, granted=1)
    )
    assert scaled["SessionReady"].reason == "WaitingForBoxes"
    assert scaled["RolloutComplete"].reason == "RollingOut"
    paused = told(
        replace(intent, paused=True), replica, serves=True, session=SessionSeen(boxes=2, granted=1)
    )
    assert paused["RolloutComplete"].reason == "Paused"


def test_a_rollout_counts_the_replicas_that_the_new_revision_serves() -> None:
    """As the progress bar does, also while their former instances finish."""
    new = replace(SERVING, name="chat-0-r2-bbbb", revision=NEW)
    leaving = replace(SERVING, goal=Goal.DRAIN)
    replica = Replica(0, heir=new, owner=new, draining=[leaving])
    rollout = told(CHAT, replica, serves=True)["RolloutComplete"]
    assert (rollout.reason, rollout.message) == ("RollingOut", "1 of 1 replicas run revision 2.")


def test_a_rollback_names_the_revision_that_its_instances_have() -> None:
    back = replace(OLD, number=3, same_as=1)
    replica = Replica(0, heir=SERVING, owner=SERVING)
    rollout = told(replace(CHAT, revision=back), replica, serves=True)["RolloutComplete"]
    assert rollout.message.startswith("1 of 1 replicas run revision 3, the same as revision 1.")


def test_a_session_without_its_boxes_says_why_and_whether_waiting_helps() -> None:
    replica = Replica(0, heir=WAITING)
    waits = SessionSeen(boxes=1, cause="WaitingForCapacity", cause_sentence="1 more box is needed.")
    found = told(CHAT, replica, serves=False, session=waits)["SessionReady"]
    assert (found.status, found.reason) == (False, "WaitingForCapacity")
    assert found.message == "Its session has 0 of 1 box. 1 more box is needed. It waits."
    never = replace(waits, cause="ExceedsClusterCapacity", refused=waits.cause_sentence)
    found = told(CHAT, replica, serves=False, session=never)["SessionReady"]
    assert found.message.endswith("Waiting does not help.")


@pytest.mark.parametrize("has_cache", [True, False])
def test_who_has_no_boxes_needs_no_session(*, has_cache: bool) -> None:
    intent = replace(CHAT, boxes_per_replica=0, revision=replace(NEW, has_cache=has_cache))
    found = told(intent, Replica(0, heir=WAITING), serves=False)["SessionReady"]
    assert (found.status, found.reason) == (True, "NotNeeded")
    assert found.message == "It has no boxes, and so no session."


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_replica_without_a_cache_leaves_a_box_for_one_that_nobody_has(spare: int) -> None:
    plain = replace(NEW, epoch=None, has_cache=False)
    first = replace(SERVING, revision=plain, boxes=("cs1",))
    second = replace(first, name="chat-1-r1-cccc", ordinal=1, boxes=("cs2",))
    third = replace(first, name="chat-2-r1-dddd", ordinal=2, boxes=("cs3",))
    intent = replace(CHAT, replicas=3, revision=plain, stable=plain, rules=RolloutSpec(max_surge=3))
    boxes = SessionSeen(boxes=3, granted=3, to_leave=frozenset({"cs1", "cs2"}), spare=spare)
    places: dict[int, int | None] = {0: None, 1: None, 2: None}
    found = decide(intent, Seen(instances=(first, second, third), session=boxes, places=places), 100.0)
    assert sum(isinstance(one, Create) for one in found.actions) == spare
    rollout = next(one for one in found.conditions if one.type == "RolloutComplete")
    assert rollout.reason == ("LeavingBoxes" if spare else "TooFewBoxes")
    assert rollout.message.endswith(" No other box is free.") == (spare == 0)


@pytest.mark.parametrize(
    ("has_cache", "to_leave", "said"),
    [
        (True, {"cs1"}, " Its job needs 2 other boxes, where it starts anew, and 1 box is free."),
        (False, {"cs1"}, " moves off cs1."),
        (False, {"cs1", "cs2"}, " moves off cs1, cs2. It needs 2 other boxes, and 1 box is free."),
    ],
)
def test_a_replica_with_a_cache_says_that_it_needs_as_many_boxes_as_it_has(
    *, has_cache: bool, to_leave: set[str], said: str
) -> None:
    """Its job starts on them before it ends: one box that is free is not enough to leave one of two.
    Without a cache it has no job, and needs as many as it leaves."""
    revision = NEW if has_cache else replace(NEW, epoch=None, has_cache=False)
    intent = replace(CHAT, boxes_per_replica=2, revision=revision, stable=revision)
    one = replace(SERVING, revision=revision, boxes=("cs1", "cs2"))
    boxes = SessionSeen(boxes=2, granted=2, to_leave=frozenset(to_leave), free=1)
    rollout = told(intent, Replica(0, rest=[one]), serves=True, session=boxes)["RolloutComplete"]
    assert rollout.message.endswith(said)


@pytest.mark.parametrize(
    ("reason", "has_failed"), [("ManagerEnded", True), ("Evicted", False), ("RecordLost", False)]
)
def test_an_instance_that_was_evicted_is_no_fault_of_its_revision(
    reason: str, *, has_failed: bool
) -> None:
    gone = replace(SERVING, state=State.GONE, reason=reason, sentence="Its node was drained.")
    decided = decide(CHAT, Seen(instances=(gone,)), 0.0)
    removed = [one for one in decided.actions if isinstance(one, Remove)]
    assert removed == [Remove(SERVING.name, has_failed, "Its node was drained.")]


def test_a_cache_is_warm_when_its_shards_are_open() -> None:
    replica = Replica(0, heir=SERVING, owner=SERVING)
    assert SERVING.home is not None
    there = HomeSeen(home=SERVING.home, has_joined=True, has_job=True, is_busy=True, is_starting=True)
    opening = told(CHAT, replica, serves=True, homes=(there,))["CacheWarm"]
    assert (opening.status, opening.reason) == (False, "OpeningShards")
    moved = replace(there, is_starting=False)  # a job that is resized serves meanwhile
    assert told(CHAT, replica, serves=True, homes=(moved,))["CacheWarm"].status is True
