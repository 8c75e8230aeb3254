"""What every backend promises of instances."""

from __future__ import annotations

import time

import pytest

from cluster_server.backend import Conflict, NotFound
from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.conformance.worlds import World
from tests.cluster_server.requests import SECRET, instance, with_goal, workload


async def test_what_is_applied_runs_and_says_how_it_is(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a"), instance("chat-1-b")))
    for name in ("chat-0-a", "chat-1-b"):
        status = await world.until_state("chat", name, pb.READY)
        assert (status.url, status.cache, status.goal) == ("http://127.0.0.1:1", pb.ATTACHED, pb.RUN)
        assert list(status.boxes) == [f"box-{name}"]
        assert status.seen_at > 0
        assert world.starts(name) == 1


async def test_applying_it_again_changes_nothing(world: World) -> None:
    request = workload("chat", 3, instance("chat-0-a"), instance("chat-1-b"))
    await world.backend.apply(request)
    await world.until_state("chat", "chat-0-a", pb.READY)
    request.instances.reverse()  # the order says nothing
    again = await world.backend.apply(request)
    assert again.generation == 3
    assert world.starts("chat-0-a") == 1


async def test_an_older_or_another_generation_is_refused(world: World) -> None:
    await world.backend.apply(workload("chat", 3, instance("chat-0-a")))
    with pytest.raises(Conflict, match="Generation 3 of chat is newer"):
        await world.backend.apply(workload("chat", 2, instance("chat-0-a")))
    with pytest.raises(Conflict, match="has other contents"):
        await world.backend.apply(workload("chat", 3))
    assert [one.name for one in world.backend.workload("chat").instances] == ["chat-0-a"]


async def test_an_instance_that_exists_keeps_its_specification(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a")))
    for changed in (instance("chat-0-a", lines=1), instance("chat-0-a")):
        changed.secrets["join_token"] = b'"another"'
        with pytest.raises(Conflict, match="another name"):
            await world.backend.apply(workload("chat", 2, changed))
    with pytest.raises(Conflict, match="There is an instance chat-0-a already"):
        await world.backend.apply(workload("other", 1, instance("chat-0-a")))
    with pytest.raises(NotFound):
        world.backend.workload("other")


async def test_goals_reach_the_manager_and_are_acknowledged(world: World) -> None:
    one = instance("chat-0-a")
    await world.backend.apply(workload("chat", 1, one))
    await world.until_state("chat", "chat-0-a", pb.READY)
    await world.backend.apply(workload("chat", 2, with_goal(one, pb.RELEASE_CACHE)))

    def is_released() -> bool:
        status = world.status("chat", "chat-0-a")
        return bool(status and (status.goal, status.cache) == (pb.RELEASE_CACHE, pb.RELEASED))

    await world.until("its cache is released", is_released)
    await world.backend.apply(workload("chat", 3, one))  # and back
    await world.until("it is attached", lambda: not is_released())
    assert world.starts("chat-0-a") == 1


async def test_an_instance_that_has_drained_is_gone_and_stays_listed(world: World) -> None:
    one = instance("chat-0-a", children=1)
    await world.backend.apply(workload("chat", 1, one))
    await world.until_state("chat", "chat-0-a", pb.READY)
    draining = with_goal(one, pb.DRAIN)
    await world.backend.apply(workload("chat", 2, draining))
    status = await world.until_state("chat", "chat-0-a", pb.GONE)
    assert (status.reason, status.url) == ("Drained", "")
    assert world.processes("chat-0-a") == []
    with pytest.raises(Conflict, match="drains"):
        await world.backend.apply(workload("chat", 3, one))
    await world.restart()
    assert (await world.until_state("chat", "chat-0-a", pb.GONE)).reason == "Drained"
    await world.backend.apply(workload("chat", 3))
    await world.until("it is forgotten", lambda: not world.backend.workload("chat").instances)


async def test_what_is_left_out_ends_with_all_that_it_has_started(world: World) -> None:
    await world.backend.apply(
        workload("chat", 1, instance("chat-0-a", children=2), instance("chat-1-b"))
    )
    for name in ("chat-0-a", "chat-1-b"):
        await world.until_state("chat", name, pb.READY)
    assert len(world.processes("chat-0-a")) == 3
    applied = await world.backend.apply(workload("chat", 2, instance("chat-1-b")))
    ending = applied.instances[0]
    assert (ending.name, ending.state, ending.reason) == ("chat-0-a", pb.DRAINING, "Terminating")
    await world.until("it is forgotten", lambda: len(world.backend.workload("chat").instances) == 1)
    assert world.processes("chat-0-a") == []
    assert len(world.processes("chat-1-b")) == 1


async def test_a_manager_that_does_not_end_is_killed_after_its_grace_period(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a", grace=3, deaf=True, children=2)))
    await world.until_state("chat", "chat-0-a", pb.READY)
    began = time.monotonic()
    await world.backend.delete("chat")
    await world.until("nothing runs", lambda: not world.processes("chat-0-a"))
    assert time.monotonic() - began >= 3


async def test_an_instance_that_is_being_ended_does_not_begin_again(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a", grace=15, deaf=True)))
    await world.until_state("chat", "chat-0-a", pb.READY)
    await world.backend.delete("chat")
    assert world.processes("chat-0-a")
    with pytest.raises(Conflict, match="just being ended"):
        await world.backend.apply(workload("chat", 1, instance("chat-0-a")))


async def test_deleting_forgets_once_everything_has_ended(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a", children=2)))
    await world.until_state("chat", "chat-0-a", pb.READY)
    await world.backend.delete("chat")
    await world.backend.delete("chat")  # once more

    def is_forgotten() -> bool:
        return all(one.name != "chat" for one in world.backend.workloads()[0])

    await world.until("it is forgotten", is_forgotten)
    assert world.processes("chat-0-a") == []
    with pytest.raises(NotFound, match="There is no workload chat"):
        await world.backend.delete("chat")
    await world.backend.apply(workload("chat", 1, instance("chat-0-c")))  # it counts from the beginning
    await world.until_state("chat", "chat-0-c", pb.READY)


async def test_a_manager_that_dies_is_started_again_after_what_it_left_has_ended(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a", children=2)))
    await world.until_state("chat", "chat-0-a", pb.READY)
    before = set(world.processes("chat-0-a"))
    world.kill_manager("chat-0-a")

    def is_settled() -> bool:
        status = world.status("chat", "chat-0-a")
        return bool(status and "by signal 9; it starts again" in status.sentence)

    await world.until("its end is settled", is_settled)
    pending = await world.until_state("chat", "chat-0-a", pb.PENDING)
    assert pending.reason == "ManagerEnded"
    assert pending.url == ""
    await world.until_state("chat", "chat-0-a", pb.READY)
    after = set(world.processes("chat-0-a"))
    assert len(after) == 3
    assert not before & after


async def test_a_manager_that_gives_up_is_gone(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a", dies=0)))
    status = await world.until_state("chat", "chat-0-a", pb.GONE)
    assert status.reason == "Ended"
    assert world.starts("chat-0-a") == 1


async def test_another_server_adopts_what_runs(world: World) -> None:
    await world.backend.apply(workload("chat", 5, instance("chat-0-a", children=1)))
    await world.until_state("chat", "chat-0-a", pb.READY)
    before = world.processes("chat-0-a")
    await world.restart()
    status = world.status("chat", "chat-0-a")
    assert status is not None
    assert (status.state, status.url) == (
        pb.READY,
        "http://127.0.0.1:1",
    )  # known from the first answer on
    assert world.processes("chat-0-a") == before
    with pytest.raises(Conflict, match="Generation 5 of chat is newer"):
        await world.backend.apply(workload("chat", 4))
    world.kill_manager("chat-0-a")  # which is noticed although it is nobody's child
    await world.until_state("chat", "chat-0-a", pb.PENDING)
    await world.until_state("chat", "chat-0-a", pb.READY)


async def test_another_server_goes_on_ending(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a", grace=10, deaf=True, children=2)))
    await world.until_state("chat", "chat-0-a", pb.READY)
    await world.backend.delete("chat")
    await world.restart()
    status = world.status("chat", "chat-0-a")
    assert status is not None
    assert (status.state, status.reason) == (pb.DRAINING, "Terminating")
    assert list(status.boxes) == ["box-chat-0-a"]
    await world.until("nothing runs", lambda: not world.processes("chat-0-a"))
    await world.until("it is forgotten", lambda: not world.backend.workloads()[0])


async def test_secrets_are_in_no_answer(world: World) -> None:
    applied = await world.backend.apply(workload("chat", 1, instance("chat-0-a")))
    await world.until_state("chat", "chat-0-a", pb.READY)
    events = world.backend.watch(0)
    snapshot = await anext(events)
    logs = b"".join([piece async for piece in world.backend.logs("chat-0-a", 0, follow=False)])
    for answer in (applied, world.backend.workload("chat"), snapshot):
        assert SECRET.encode() not in answer.SerializeToString()
    assert SECRET.encode() not in logs
