"""When a revision is found to be worse, and when it is not."""

from __future__ import annotations

from dataclasses import replace

from console.workloads.leader.verdicts import judge
from console.workloads.leader.world import NEVER, Instance, Intent, Revision, Seen, State
from console.workloads.spec import RolloutSpec

OLD, NEW = Revision(number=1, digest="old"), Revision(number=2, digest="new")
INTENT = Intent(
    name="chat",
    replicas=2,
    revision=NEW,
    stable=OLD,
    is_rolling=True,
    begun_at=1000.0,
    rules=RolloutSpec(deadline_seconds=600.0),
)
SLOW = Instance(
    name="chat-1", ordinal=1, revision=NEW, created_at=1000.0, since=1000.0, state=State.STARTING
)


def test_an_instance_that_is_not_ready_in_time_is_the_fault_of_its_revision() -> None:
    seen = Seen(instances=(SLOW,))
    assert judge(INTENT, seen, 1599.0) == (None, 1600.0)
    verdict = judge(INTENT, seen, 1600.0).verdict
    assert verdict
    assert verdict.reason == "DeadlineExceeded"


def test_one_that_was_ready_and_starts_anew_has_the_time_again() -> None:
    """A rollout takes long, and an engine that has served for most of it may end by itself."""
    again = replace(SLOW, was_ready=True, since=1900.0)
    assert judge(INTENT, Seen(instances=(again,)), 2000.0) == (None, 2500.0)
    verdict = judge(INTENT, Seen(instances=(again,)), 2500.0).verdict
    assert verdict
    assert verdict.reason == "DeadlineExceeded"


def test_who_waits_for_room_is_not_late_and_has_the_time_from_then_on() -> None:
    waits = replace(SLOW, room_at=NEVER)
    assert judge(INTENT, Seen(instances=(waits,)), 9000.0) == (None, NEVER)
    has_room = replace(SLOW, room_at=8000.0)
    assert judge(INTENT, Seen(instances=(has_room,)), 8599.0) == (None, 8600.0)
    assert judge(INTENT, Seen(instances=(has_room,)), 8600.0).verdict
