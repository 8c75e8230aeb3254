"""What every backend promises of jobs, of logs, and of those who watch."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing

import pytest

from cluster_server.backend import Exists, NotFound
from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.conformance.worlds import World
from tests.cluster_server.requests import SECRET, instance, job, with_goal, workload

ENDED = (pb.JOB_SUCCEEDED, pb.JOB_FAILED, pb.JOB_CANCELLED)


async def until_ended(world: World, name: str) -> pb.Job:
    await world.until(f"{name} has ended", lambda: world.backend.job(name).state in ENDED)
    return world.backend.job(name)


async def test_a_job_ends_with_its_result(world: World) -> None:
    submitted = await world.backend.submit(job("compile-1", result={"layout": 7}))
    assert submitted.state in (pb.JOB_PENDING, pb.JOB_RUNNING)
    done = await until_ended(world, "compile-1")
    assert done.state == pb.JOB_SUCCEEDED
    assert json.loads(done.result) == {"layout": 7}
    assert (done.progress.done, done.progress.unit) == (1, "steps")
    assert done.ended_at >= done.submitted_at > 0
    assert SECRET.encode() not in done.SerializeToString()


async def test_a_job_is_started_once_for_its_name(world: World) -> None:
    first, *others = await asyncio.gather(
        *(world.backend.submit(job("compile-1", result={})) for _ in range(5))
    )
    assert {one.submitted_at for one in others} == {first.submitted_at}
    await until_ended(world, "compile-1")
    assert (await world.backend.submit(job("compile-1", result={}))).state == pb.JOB_SUCCEEDED
    await world.restart()
    assert (await world.backend.submit(job("compile-1", result={}))).state == pb.JOB_SUCCEEDED
    assert world.starts("compile-1") == 1
    with pytest.raises(Exists, match="with other contents"):
        await world.backend.submit(job("compile-1", result={"other": 1}))
    changed = job("compile-1", result={})
    changed.secrets["api_key"] = b'"another"'
    with pytest.raises(Exists):
        await world.backend.submit(changed)


async def test_what_a_failed_job_says(world: World) -> None:
    fails = {"reason": "TooLarge", "sentence": "The model needs 80 GiB; a box has 44 GiB."}
    await world.backend.submit(job("compile-1", fails=fails))
    done = await until_ended(world, "compile-1")
    assert (done.state, done.reason, done.sentence) == (pb.JOB_FAILED, *fails.values())
    await world.backend.submit(job("compile-2"))
    done = await until_ended(world, "compile-2")
    assert (done.state, done.reason) == (pb.JOB_FAILED, "ExitStatus")
    assert done.sentence == "It has ended with exit status 3. It said last: working"


async def test_a_cancelled_job_ends(world: World) -> None:
    await world.backend.submit(job("compile-1", waits=True, result={}))
    await world.until("it runs", lambda: world.starts("compile-1") == 1)
    await world.backend.cancel("compile-1")
    await world.backend.cancel("compile-1")
    done = await until_ended(world, "compile-1")
    assert (done.state, done.reason) == (pb.JOB_CANCELLED, "Cancelled")
    assert world.processes("compile-1") == []
    assert (await world.backend.cancel("compile-1")).state == pb.JOB_CANCELLED
    with pytest.raises(NotFound, match="There is no job compile-2"):
        await world.backend.cancel("compile-2")


async def test_a_job_has_a_deadline(world: World) -> None:
    await world.backend.submit(job("compile-1", waits=True, result={}, deadline=1))
    done = await until_ended(world, "compile-1")
    assert (done.state, done.reason) == (pb.JOB_FAILED, "DeadlineExceeded")
    assert world.processes("compile-1") == []


async def test_one_of_a_workload_runs_and_waiting_takes_no_deadline(world: World) -> None:
    mine = [f"compile-mine-r{number}-{number}-0" for number in (1, 2)]
    theirs = [f"compile-{name}-r1-1-0" for name in ("theirs", "others")]
    for name in mine:
        await world.backend.submit(
            job(name, waits=True, result={}, deadline=2 if name == mine[1] else 0)
        )
    for name in theirs:
        await world.backend.submit(job(name, waits=True, result={}))
    await world.until("two run", lambda: world.starts(mine[0]) + world.starts(theirs[0]) == 2)
    assert world.starts(mine[1]) == 0
    world.write(mine[0], "go")
    await until_ended(world, mine[0])
    await world.until("it is the turn of others", lambda: world.starts(theirs[1]) == 1)
    assert world.backend.job(mine[1]).state == pb.JOB_PENDING
    deadline = world.backend.job(mine[1]).submitted_at + 2
    await world.until("it would be late", lambda: time.time() > deadline + 0.2)
    assert world.backend.job(mine[1]).state == pb.JOB_PENDING
    turn = time.time()
    world.write(theirs[0], "go")
    done = await until_ended(world, mine[1])
    assert done.reason == "DeadlineExceeded"
    assert done.ended_at >= turn + 2, "it had its whole time"
    assert world.starts(mine[1]) <= 1  # a busy machine may take all of it to start a process


async def test_a_job_goes_on_while_the_server_is_replaced(world: World) -> None:
    await world.backend.submit(job("compile-1", waits=True, result={"layout": 7}))
    await world.until("it runs", lambda: world.starts("compile-1") == 1)
    await world.restart()
    assert world.backend.job("compile-1").state in (pb.JOB_PENDING, pb.JOB_RUNNING)
    world.write("compile-1", "go")
    done = await until_ended(world, "compile-1")
    assert done.state == pb.JOB_SUCCEEDED
    assert world.starts("compile-1") == 1


async def test_jobs_wait_for_their_turn_and_old_ones_are_forgotten(world: World) -> None:
    for number in range(3):
        await world.backend.submit(job(f"long-{number}", waits=True, result={}))
    await world.until("two run", lambda: world.starts("long-0") + world.starts("long-1") == 2)
    assert world.backend.job("long-2").state == pb.JOB_PENDING
    for number in range(3):
        await world.until("it is its turn", lambda: world.starts(f"long-{number}") == 1)  # noqa: B023
        world.write(f"long-{number}", "go")
        await until_ended(world, f"long-{number}")
    for number in range(4):
        await world.backend.submit(job(f"short-{number}", result={}))
        await until_ended(world, f"short-{number}")
    kept = ["long-2", "short-0", "short-1", "short-2", "short-3"]
    await world.until("old ones are gone", lambda: [one.name for one in world.backend.jobs()] == kept)


async def test_who_watches_a_job_sees_its_end(world: World) -> None:
    await world.backend.submit(job("compile-1", waits=True, result={"layout": 7}))
    states = []
    async with asyncio.timeout(60), aclosing(world.backend.watch_job("compile-1")) as seen:
        async for one in seen:
            states.append(one.state)
            if one.state == pb.JOB_RUNNING and one.progress.total:
                world.write("compile-1", "go")
    assert states[-1] == pb.JOB_SUCCEEDED
    assert pb.JOB_RUNNING in states


async def test_logs_are_followed_to_the_end(world: World) -> None:
    one = instance("chat-0-a", lines=500)
    await world.backend.apply(workload("chat", 1, one))
    await world.until_state("chat", "chat-0-a", pb.READY)
    tail = b"".join([piece async for piece in world.backend.logs("chat-0-a", 3, follow=False)])
    assert tail == b"line 497\nline 498\nline 499\n"
    found = bytearray()
    async with asyncio.timeout(60):
        async for piece in world.backend.logs("chat-0-a", 0, follow=True):
            found += piece
            if found.endswith(b"line 499\n"):
                await world.backend.apply(workload("chat", 2, with_goal(one, pb.DRAIN)))
    lines = found.decode().splitlines()
    assert lines == [*(f"line {number}" for number in range(500)), "ended"]
    with pytest.raises(NotFound, match="There is no instance chat-9"):
        world.backend.logs("chat-9", 0, follow=True)


async def test_who_watches_gets_a_snapshot_then_changes_then_the_end(world: World) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a")))
    await world.until_state("chat", "chat-0-a", pb.READY)
    async with asyncio.timeout(60), aclosing(world.backend.watch(0)) as events:
        snapshot = await anext(events)
        assert (snapshot.kind, snapshot.workload.name) == (pb.Event.SNAPSHOT, "chat")
        complete = await anext(events)
        assert complete.kind == pb.Event.COMPLETE
        await world.backend.apply(workload("chat", 2))
        kinds = []
        async for event in events:
            kinds.append(event.kind)
            if event.kind == pb.Event.CHANGED and not event.workload.instances:
                await world.backend.delete("chat")
            if event.kind == pb.Event.DELETED:
                break
        assert kinds[-1] == pb.Event.DELETED
    async with asyncio.timeout(60), aclosing(world.backend.watch(complete.version)) as events:
        resumed = await anext(events)  # what has happened since, and no snapshot
        assert (resumed.kind, resumed.version) == (pb.Event.CHANGED, complete.version + 1)
    await world.restart()
    async with asyncio.timeout(60), aclosing(world.backend.watch(complete.version)) as events:
        again = await anext(events)  # of another life: nothing is left but to begin anew
        assert again.kind == pb.Event.COMPLETE
        assert again.version > event.version
