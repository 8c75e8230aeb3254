"""What a killed supervisor has left is found again and stopped, and nobody else is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from console.environment import PROJECT
from console.stack import remembered
from console.stack.remembered import Remembered
from tests.stack.sessions import is_running, members

WAITS = "import time; print('here', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WITH_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}]); "
# One write for name and line end: two processes tell at the same time, into one file.
TELLS = """
import os, signal, sys, time
def stop(number, _): sys.exit(os.write(2, f"{signal.Signals(number).name}\\n".encode()) * 0)
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, stop)
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to be cleaned up, whatever a test does."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()


def start(started: list[subprocess.Popen[str]], code: str) -> subprocess.Popen[str]:
    """A Python process in a session of its own; returns when it says that it is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=PROJECT,
    )
    started.append(process)
    assert process.stdout
    process.stdout.readline()
    return process


def test_stops_what_is_left_each_in_its_own_way(
    tmp_path: Path, started: list[subprocess.Popen[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    web, database = start(started, TELLS), start(started, TELLS)
    memory = Remembered(tmp_path)
    memory.remember("web", web.pid, signal.SIGTERM)
    memory.remember("database", database.pid, signal.SIGINT)
    assert sorted(memory.stop_all()) == ["database", "web"]
    assert not is_running(web.pid)
    assert not is_running(database.pid)
    assert sorted(capfd.readouterr().err.split()) == ["SIGINT", "SIGTERM"]
    assert memory.stop_all() == []


def test_kills_what_does_not_listen_with_all_its_children(
    tmp_path: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "STOP_SECONDS_MAX", 0.2)
    worker = start(started, STUBBORN + WITH_CHILD + WAITS)
    memory = Remembered(tmp_path)
    memory.remember("worker", worker.pid, signal.SIGTERM)
    assert len(members(worker.pid)) == 2
    assert memory.stop_all() == ["worker"]
    assert not members(worker.pid)


def test_finds_the_children_of_one_that_is_gone(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    worker = start(started, WITH_CHILD + WAITS)
    memory = Remembered(tmp_path)
    memory.remember("worker", worker.pid, signal.SIGTERM)
    worker.kill()
    worker.wait()
    assert len(members(worker.pid)) == 1
    assert memory.stop_all() == ["worker"]
    assert not members(worker.pid)


def test_a_process_id_that_was_given_to_somebody_else_is_left_in_peace(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    stranger = start(started, WAITS)
    memory = Remembered(tmp_path)
    memory.remember("web", stranger.pid, signal.SIGTERM)
    fact = memory.facts()["web"]
    older = replace(fact, created=fact.created - 3_600)
    (tmp_path / "web.json").write_text(json.dumps(asdict(older)))
    assert memory.stop_all() == []
    assert is_running(stranger.pid)


def test_a_damaged_file_is_nobody(tmp_path: Path) -> None:
    (tmp_path / "web.json").write_text('{"pid": 1')
    (tmp_path / "worker.json").write_text('{"something": "else"}')
    assert Remembered(tmp_path).stop_all() == []
