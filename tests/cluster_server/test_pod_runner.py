"""Process 1 of a pod, and what it says of its manager to the kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import time
from pathlib import Path

import pytest

from cluster_server.pod import runner
from cluster_server.pod.http import Request
from cluster_server.pod.runner import Runner, RunnerSettings
from cluster_server.processes.manager_status import ManagerStatus


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 200),
        (RuntimeError("can't start new thread"), 200),
        (OSError(errno.ECONNREFUSED, "Connection refused"), 503),
    ],
    ids=repr,
)
async def test_a_manager_that_can_not_be_asked_is_not_silent_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    """The kubelet would end it, and its engine."""
    now, asked, fails = time.monotonic(), asyncio.Event(), True

    async def ask(*_: object) -> ManagerStatus:
        asked.set()
        if fails:
            raise error
        await asyncio.sleep(0)
        return ManagerStatus("ready", version=1)

    monkeypatch.setattr(runner, "ask", ask)
    monkeypatch.setattr(runner, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    made = Runner(RunnerSettings("run", tmp_path, tmp_path, tmp_path, 0, "key", 60.0, (), {}))

    async def probe(path: str) -> int:
        return (await made._answer(Request("GET", path, "", b""))).status

    asking = asyncio.create_task(made._ask())
    try:
        await asked.wait()
        now += 60.0
        for _ in range(2):
            asked.clear()
            await asyncio.wait([asyncio.ensure_future(asked.wait())], timeout=60.0)
        assert await probe("/live") == status
        fails = False
        while await probe("/ready") != 200:
            assert not asking.done()
            await asyncio.sleep(0)
        assert await probe("/live") == 200
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


async def test_a_silent_manager_is_not_live_although_it_can_not_be_asked_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked, times = time.monotonic(), asyncio.Event(), itertools.count()

    async def ask(*_: object) -> ManagerStatus:
        nonlocal now
        if next(times) % 2:
            asked.set()
            raise OSError(errno.EMFILE, "Too many open files")
        now += 30.0
        raise TimeoutError

    monkeypatch.setattr(runner, "ask", ask)
    monkeypatch.setattr(runner, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    made = Runner(RunnerSettings("run", tmp_path, tmp_path, tmp_path, 0, "key", 60.0, (), {}))
    asking = asyncio.create_task(made._ask())
    try:
        for _ in range(3):
            asked.clear()
            await asyncio.wait([asyncio.ensure_future(asked.wait())], timeout=60.0)
        assert (await made._answer(Request("GET", "/live", "", b""))).status == 503
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
