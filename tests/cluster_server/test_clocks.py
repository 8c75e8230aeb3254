"""Managers and jobs have their time, whatever the machine's clock is set to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from cluster_server.processes import backend
from cluster_server.processes import instance as asked_by
from cluster_server.processes.core import Limits, Running, Seen, Step
from cluster_server.processes.folder import Folder
from cluster_server.processes.instance import STATUS_FILE, InstanceWorker
from cluster_server.processes.job import JobWorker, about_job
from cluster_server.processes.keeper import Keeper, Launch
from cluster_server.processes.kernel import LinuxKernel
from cluster_server.processes.surroundings import Clock, Surroundings
from cluster_server.processes.worker import Worker
from cluster_server.proto import cluster_pb2 as pb
from telemetry.decoder import Malformed
from tests.cluster_server.conformance.worlds import Processes
from tests.cluster_server.requests import instance, job, workload
from tests.live import wait_until

SILENT_SECONDS = 60.0
HOUR = 3600.0
SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(600)")  # whatever it is told


class SetClock(Clock):
    """The server's own, which a test moves."""

    def __init__(self) -> None:
        self.seconds = time.time()

    def now(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def around(tmp_path: Path, clock: SetClock) -> Surroundings:
    limits = Limits(SILENT_SECONDS)
    return Surroundings(LinuxKernel(), SLEEPS, {}, tmp_path / "shared", limits=limits, clock=clock)


def an_instance(folder: Path, around: Surroundings) -> InstanceWorker:
    keeper = Keeper(Folder(folder), around.kernel, around.clock.now())
    return InstanceWorker("chat", "chat-0", instance("chat-0"), keeper, around, ignore, ignore)


def a_job(folder: Path, around: Surroundings) -> JobWorker:
    made = Folder(folder)
    made.make(about_job(job("compile-x", deadline=int(HOUR)), around.clock.now()), b"{}", {})
    keeper = Keeper(made, around.kernel, around.clock.now())
    return JobWorker(keeper, around, lambda _: True, ignore)


def ignore(*_: object) -> None:
    pass


@contextlib.asynccontextmanager
async def begun(worker: Worker) -> AsyncIterator[None]:
    """Until it has been started, and without a look at it after that."""
    try:
        while step(worker) is not Step.START:
            pass
        yield
    finally:
        worker.keeper.kill()
        await worker.let_go()


def step(worker: Worker) -> Step:
    """The next one, done."""
    seen: Seen = worker.keeper.look(worker.last_seen())
    decided = worker.decide(seen).step
    if decided is not Step.WAIT:
        worker.do(decided, seen)
    return decided


def set_back(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The machine's clock, but not what has passed."""
    at = time.time() - seconds
    monkeypatch.setattr(time, "time", lambda: at)


async def test_a_job_has_its_time_although_the_clock_was_set_back(
    tmp_path: Path, around: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_back(monkeypatch, 2 * HOUR)
    worker = a_job(tmp_path / "job", around)
    async with begun(worker):
        assert step(worker) is Step.WAIT


async def test_a_job_does_not_get_more_where_the_clock_was_set_forward(
    tmp_path: Path, around: Surroundings, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_back(monkeypatch, -2 * HOUR)
    worker = a_job(tmp_path / "job", around)
    async with begun(worker):
        assert step(worker) is Step.WAIT
        clock.seconds += HOUR
        assert step(worker) is Step.TERMINATE


async def test_a_manager_that_is_started_again_has_its_time_although_the_clock_was_set_back(
    tmp_path: Path, around: Surroundings, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = an_instance(tmp_path / "one", around)
    async with begun(worker):
        clock.seconds += 2 * HOUR  # for which the server has run
        set_back(monkeypatch, 2 * HOUR)
        assert worker.keeper.process
        os.kill(worker.keeper.process.pid, signal.SIGKILL)
        wait_until("it has ended", lambda: worker.keeper.look(0.0).process is Running.ENDED)
        assert step(worker) is Step.SETTLE
        clock.seconds += 10.0
        async with begun(worker):
            assert step(worker) is Step.WAIT


async def test_a_manager_has_its_time_however_long_its_start_took(
    tmp_path: Path, around: Surroundings, clock: SetClock
) -> None:
    """As on a disk that stands still. It counts from the first look."""
    worker = an_instance(tmp_path / "one", around)
    async with begun(worker):
        clock.seconds += HOUR
        assert step(worker) is Step.WAIT
        clock.seconds += SILENT_SECONDS
        assert step(worker) is Step.KILL


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (OSError(errno.EMFILE, "Too many open files"), Step.WAIT),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Step.WAIT),
        (RuntimeError("can't start new thread"), Step.WAIT),
        (OSError(errno.ECONNREFUSED, "Connection refused"), Step.KILL),
        (TimeoutError(), Step.KILL),
        (Malformed("It has no state"), Step.KILL),
    ],
    ids=repr,
)
async def test_a_manager_that_a_server_can_not_ask_is_not_silent(
    tmp_path: Path,
    around: Surroundings,
    clock: SetClock,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    after: Step,
) -> None:
    asked = asyncio.Event()

    async def fail(*_: object) -> NoReturn:
        asked.set()
        raise error

    monkeypatch.setattr(asked_by, "ask", fail)
    monkeypatch.setattr(asked_by, "ASK_AGAIN_SECONDS", 0.0)
    worker = an_instance(tmp_path / "one", around)
    async with begun(worker):
        assert step(worker) is Step.WAIT
        clock.seconds += SILENT_SECONDS
        for _ in range(2):  # what is asked the second time is asked at that time as a whole
            asked.clear()
            await asyncio.wait_for(asked.wait(), 60.0)
        assert step(worker) is after


async def test_a_silent_manager_is_killed_although_a_server_can_not_ask_it_now_and_then(
    tmp_path: Path, around: Surroundings, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    times = itertools.count()

    async def fail(*_: object) -> NoReturn:
        if next(times) % 2:
            asked.set()
            raise OSError(errno.EMFILE, "Too many open files")
        clock.seconds += SILENT_SECONDS / 2
        raise TimeoutError

    monkeypatch.setattr(asked_by, "ask", fail)
    monkeypatch.setattr(asked_by, "ASK_AGAIN_SECONDS", 0.0)
    worker = an_instance(tmp_path / "one", around)
    async with begun(worker):
        assert step(worker) is Step.WAIT
        for _ in range(3):
            asked.clear()
            await asyncio.wait_for(asked.wait(), 60.0)
        assert step(worker) is Step.KILL


async def test_a_silent_manager_is_noticed_although_the_next_server_s_clock_is_behind(
    tmp_path: Path, around: Surroundings, clock: SetClock
) -> None:
    """What the server before has recorded is later than now."""
    worker = an_instance(tmp_path / "one", around)
    async with begun(worker):
        said = {"state": "ready", "version": 1}
        (tmp_path / "one" / STATUS_FILE).write_bytes(msgspec.json.encode(said))
        clock.seconds -= 2 * HOUR
        after = an_instance(tmp_path / "one", around)
        assert step(after) is Step.WAIT
        clock.seconds += SILENT_SECONDS
        assert step(after) is Step.KILL
        await after.let_go()


async def test_a_server_that_stood_still_takes_no_manager_for_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SetClock
) -> None:
    monkeypatch.setattr(backend, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(Clock, "now", lambda _: clock.seconds)
    world = Processes(tmp_path, has_cgroups=False, spares=0)
    await world.open()
    try:
        await world.backend.apply(workload("chat", 1, instance("chat-0")))
        await world.until_state("chat", "chat-0", pb.READY)
        clock.seconds += HOUR
        worker = world.worker("chat-0")
        await world.until("it has its time", lambda: worker.last_seen() == clock.seconds)
        assert step(worker) is Step.WAIT
    finally:
        await world.close()


def test_what_was_recorded_later_than_now_counts_from_now(tmp_path: Path, clock: SetClock) -> None:
    keeper = Keeper(Folder(tmp_path), LinuxKernel(), clock.now())
    keeper.start(Launch(SLEEPS, {}), clock.now())
    try:
        clock.seconds -= HOUR
        after = Keeper(Folder(tmp_path), LinuxKernel(), clock.now())
        assert after.look(0.0).started_at == clock.now()
        clock.seconds += 2 * HOUR
        after = Keeper(Folder(tmp_path), LinuxKernel(), clock.now())
        assert after.look(0.0).started_at == clock.now() - HOUR
    finally:
        keeper.kill()
