"""A daemon that is forked off is a process as any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from console.environment import PROJECT
from tests.live import wait_until
from tests.processes import Process, run, start


def agent_in(directory: Path) -> Process:
    """One that listens."""
    log = directory / "log"
    where = ("--state-dir", str(directory), "--control", "127.0.0.1:0")
    with log.open("wb") as output:
        process = start("kvss_agent", *where, descriptors={2: output.fileno()})
    wait_until("it listens", lambda: "Listening" in log.read_text())
    return process


def test_it_prints_what_an_interpreter_of_its_own_prints() -> None:
    alone = subprocess.run(
        [sys.executable, "-m", "kvss_agent", "--help"], cwd=PROJECT, capture_output=True, check=True
    )
    assert run("kvss_agent", "--help", environment=os.environ) == alone.stdout.decode()


def test_it_ends_with_its_own_code_and_has_an_environment_of_its_own(tmp_path: Path) -> None:
    refused = {**os.environ, "KVSS_AGENT_MEMORY": "much"}
    with (tmp_path / "said").open("w+b") as said:
        process = start("kvss_agent", environment=refused, descriptors={2: said.fileno()})
        assert process.wait(30) == os.EX_CONFIG
        said.seek(0)
        assert b"--memory is 'much'" in said.read()
    assert "KVSS_AGENT_MEMORY" not in os.environ


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_it_can_be_ended_and_killed(tmp_path: Path, how: signal.Signals, code: int) -> None:
    process = agent_in(tmp_path)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(how)
    assert process.wait(30) == code
    assert process.poll() == code
    process.kill()  # which is too late, and no error
