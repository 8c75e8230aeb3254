"""A server that is killed, at any moment, and the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from cluster_server.client import Away, ClusterClient, Refused
from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.requests import instance, job
from tests.cluster_server.servers import ServerProcess, server
from tests.live import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LIVES = 6
SECONDS_MAX = 60.0


async def until_state(cluster: ClusterClient, name: str, state: pb.State) -> pb.InstanceStatus:
    async with asyncio.timeout(SECONDS_MAX), aclosing(cluster.watch()) as events:
        async for event in events:
            for one in event.workload.instances:
                if (one.name, one.state) == (name, state):
                    found: pb.InstanceStatus = one
                    return found
    raise AssertionError("a watch has ended")


def starts(running: ServerProcess, name: str) -> int:
    return len((running.state / "instances" / name / "started").read_text().splitlines())


async def test_killed_while_it_creates_and_deletes(tmp_path: Path) -> None:
    """Whatever it was doing: what was answered is done, once, and nothing else runs."""
    seconds = random.Random(7)
    with server(tmp_path) as running:
        desired: set[str] = set()
        for life in range(LIVES):
            names = [f"w{life}-{number}" for number in range(3)]

            async def change(life: int = life, names: list[str] = names) -> None:
                async with ClusterClient(running.target) as cluster:
                    for name in names:
                        if life % 2:
                            former = f"w{life - 1}-{name[-1]}"
                            desired.discard(former)  # from here on either is right
                            with contextlib.suppress(Refused):  # its creation was cut off
                                await cluster.delete(former)
                        await cluster.apply(name, 1, [instance(f"{name}-0-a", children=2)])
                        desired.add(name)

            changing = asyncio.create_task(change())
            await asyncio.sleep(seconds.uniform(0.0, 0.4))  # the moment is what is tested
            running.kill()
            await asyncio.gather(changing, return_exceptions=True)
            assert changing.exception() is None or isinstance(changing.exception(), Away)
            running.start()
        async with ClusterClient(running.target) as cluster:
            found = {one.name for one in (await cluster.list())[0] if one.generation}
            assert desired <= found  # of what was not answered nobody knows
            for name in found:
                await until_state(cluster, f"{name}-0-a", pb.READY)
            wait_until("nothing else runs", lambda: len(running.processes()) == 3 * len(found))
            for name in found:
                # One that was killed at the very start of a manager may have started it once more.
                assert 1 <= starts(running, f"{name}-0-a") <= 2
                await cluster.delete(name)
            wait_until("nothing runs", lambda: not running.processes())
            wait_until("nothing is left", lambda: not list((running.state / "instances").iterdir()))


async def test_what_ended_while_nobody_looked(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        async with ClusterClient(running.target) as cluster:
            await cluster.apply("chat", 1, [instance("chat-0-a", children=2), instance("chat-1-b")])
            for name in ("chat-0-a", "chat-1-b"):
                await until_state(cluster, name, pb.READY)
            await cluster.submit(job("compile-1", waits=True, result={"layout": 7}))
            wait_until("it works", (running.state / "jobs/compile-1/started").exists)
        running.kill()
        manager = int((running.state / "instances/chat-0-a/started").read_text())
        running.write("jobs/compile-1/go")
        wait_until("the job ends", (running.state / "jobs/compile-1/result.json").exists)
        os.kill(manager, 9)
        before = running.processes()
        running.start()
        async with ClusterClient(running.target) as cluster:
            jobs = [one async for one in cluster.watch_job("compile-1")]
            assert jobs[-1].state == pb.JOB_SUCCEEDED
            await until_state(cluster, "chat-0-a", pb.READY)
            after = set(running.processes())
            other = int((running.state / "instances/chat-1-b/started").read_text())
            assert set(before) & after == {other}  # what the dead manager left has ended first
            assert len(after) == 4


async def test_no_process_is_left_where_a_spare_was_just_told_what_to_be(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        wait_until("a spare waits", lambda: len(running.family()) == 2)
        [spare] = {*running.family()} - {running.pid}
        os.kill(spare, signal.SIGSTOP)  # as on a busy machine, where it has not come to read it
        async with ClusterClient(running.target) as cluster:
            await cluster.apply("chat", 1, [instance("chat-0-a", children=1)])
    assert running.family() == []


async def test_sigterm_leaves_instances_alone(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        async with ClusterClient(running.target) as cluster:
            await cluster.apply("chat", 1, [instance("chat-0-a", children=1)])
            await until_state(cluster, "chat-0-a", pb.READY)
            before = running.processes()
            assert running.terminate() == 0
            assert running.processes() == before
            async with ClusterClient(running.target, call_seconds=0.5) as hasty:
                with pytest.raises(Away):
                    await hasty.list()
            running.start()
            [found] = (await cluster.list())[0]
            assert found.instances[0].state == pb.READY
        assert running.processes() == before


async def test_sigterm_ends_instances_where_that_is_wanted(tmp_path: Path) -> None:
    with server(tmp_path, "--end-instances", "--end-time", "1s") as running:
        async with ClusterClient(running.target) as cluster:
            await cluster.apply("chat", 1, [instance("chat-0-a", deaf=True, children=2)])
            await until_state(cluster, "chat-0-a", pb.READY)
            await cluster.submit(job("long", waits=True))
            assert running.terminate() == 0
            assert running.processes() == []
            running.start()  # what is desired is desired
            await until_state(cluster, "chat-0-a", pb.READY)
            assert (await cluster.job("long")).state == pb.JOB_CANCELLED


async def test_a_watch_goes_on_over_a_restart(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        async with (
            ClusterClient(running.target) as cluster,
            asyncio.timeout(SECONDS_MAX),
            aclosing(cluster.watch()) as events,
        ):
            assert (await anext(events)).kind == pb.Event.COMPLETE
            await cluster.apply("chat", 1, [instance("chat-0-a")])
            assert (await anext(events)).workload.name == "chat"
            running.kill()
            running.start()
            kinds = set()
            async for event in events:
                kinds.add(event.kind)
                if event.kind == pb.Event.COMPLETE:
                    break
            assert pb.Event.SNAPSHOT in kinds


async def test_a_second_server_on_one_state_directory_is_refused(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "cluster_server", "--state", str(running.state)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1
        assert "another process uses the state directory" in done.stderr


async def test_boxes_have_one_holder_also_after_a_crash(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        async with ClusterClient(running.target) as cluster:
            await cluster.lock("session-1", ["box-1"])
            running.kill()
            running.start()
            with pytest.raises(Refused, match="Others have box-1 \\(of session-1\\)") as refused:
                await cluster.lock("session-2", ["box-2", "box-1"])
            assert refused.value.reason == "FAILED_PRECONDITION"
            assert [one.holder for one in await cluster.boxes()] == ["session-1", ""]
            await cluster.lock("session-1", ["box-1", "box-2"])
            with pytest.raises(Refused, match="There is no box box-9"):
                await cluster.lock("session-1", ["box-9"])
            await cluster.unlock("session-1", ["box-1"])
            await cluster.unlock("session-1", ["box-1"])
            assert [one.holder for one in await cluster.boxes()] == ["", "session-1"]
