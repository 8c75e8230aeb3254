"""What finds tests that race does find them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from console.environment import PROJECT
from tests import late

LATE = Path(__file__).parent / "late"
TESTS = """
import os, socket, threading, time
from concurrent.futures import ThreadPoolExecutor

def test_that_looks_too_early():
    ours, theirs = socket.socketpair()
    done = []
    def serve():
        theirs.sendall(b"done")
        done.append(True)
    threading.Thread(target=serve, daemon=True).start()
    assert ours.recv(4) == b"done"
    assert done

def test_that_looks_too_early_at_a_file(tmp_path):
    done = []
    (tmp_path / "draft").touch()
    def store():
        os.rename(tmp_path / "draft", tmp_path / "stored")
        done.append(True)
    threading.Thread(target=store, daemon=True).start()
    while not (tmp_path / "stored").exists():
        time.sleep(0.01)
    assert done

def test_that_looks_before_a_pool_has_begun():
    done, pool = [], ThreadPoolExecutor(1)
    for _ in range(100):
        pool.submit(done.append, True)
    time.sleep(0.1)
    count = len(done)
    pool.shutdown(cancel_futures=True)
    assert count == 100

def test_that_sends_itself():
    ours, _theirs = socket.socketpair()
    began = time.monotonic()
    ours.sendall(b"done")
    assert time.monotonic() - began < 60
"""


def test_a_test_that_looks_before_it_is_done_fails_where_servers_are_late(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", tmp_path],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(LATE),
            "LATE_SEND": "60",
            "LATE_FILE": "60",
            "LATE_WAKE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "test_that_looks_too_early - assert []" in run.stdout, run.stdout + run.stderr
    assert "test_that_looks_too_early_at_a_file - assert []" in run.stdout
    assert "test_that_looks_before_a_pool_has_begun - assert" in run.stdout
    assert "3 failed, 1 passed" in run.stdout


def test_processes_that_inherit_nothing_are_late_too_where_the_run_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PYTHONPATH", "LATE_SEND", "LATE_FILE", "LATE_WAKE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", "of a developer")
    assert late.told() == {}
    monkeypatch.setenv("PYTHONPATH", str(LATE.relative_to(PROJECT)))
    monkeypatch.setenv("LATE_WAKE", "0.5")
    starts = (
        "import subprocess, sys\n"
        "code = 'import sys; print(sys.modules[\"sitecustomize\"].WAKE)'\n"
        "subprocess.run([sys.executable, '-c', code], cwd=sys.argv[1], check=True)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", starts, tmp_path],
        cwd=PROJECT,
        env=late.told(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "0.5\n", run.stderr
