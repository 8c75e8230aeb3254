"""A test run that is killed leaves no processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guard import Guard
from tests.live import wait_until

RUN = """
import os, subprocess, sys
from pathlib import Path
from tests.guard import Guard
guard = Guard()
guard.watch(Path(sys.argv[1]))
guard.watch(Path(sys.argv[2]))
print("watched", flush=True)
sys.stdin.read()
"""


def environment(folder: Path, variable: str) -> dict[str, str]:
    return {**os.environ, variable: f"{folder / 'instances' / 'a'}"}


@contextlib.contextmanager
def sleeping(folder: Path, variable: str = "ITS_FOLDER") -> Iterator[subprocess.Popen[bytes]]:
    """Of a session of its own, as managers and servers are."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=environment(folder, variable),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def run_of(*folders: Path) -> Iterator[subprocess.Popen[bytes]]:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, *map(str, folders)],
        env=environment(folders[1], "PYTEST_ADDOPTS"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with run:
        assert run.stdout
        assert run.stdout.readline() == b"watched\n"
        yield run
        run.kill()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_has_a_folder_of_a_run_that_was_killed_is_killed(
    tmp_path: Path, how: signal.Signals
) -> None:
    folders = [tmp_path / name for name in ("servers", "tests", "tests-2")]
    with run_of(*folders[:2]) as run, contextlib.ExitStack() as stack:
        server, manager, other = [stack.enter_context(sleeping(folder)) for folder in folders]
        run.send_signal(how)
        run.wait()
        wait_until("they are killed", lambda: None not in (server.poll(), manager.poll()))
        assert other.poll() is None


def test_who_starts_runs_or_looks_at_their_folders_is_not_killed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("servers", "tests")]
    with contextlib.ExitStack() as stack:
        starter = stack.enter_context(sleeping(folders[1], "BASE"))
        run = stack.enter_context(run_of(*folders))
        names = ("PWD", "OLDPWD", "PYTEST_ADDOPTS")  # the last one: of the next run
        others = [stack.enter_context(sleeping(folders[1], name)) for name in names]
        run.kill()
        for _ in range(2):  # the second one is killed when all others have been looked at
            with sleeping(folders[1]) as its:
                assert its.wait(60) == -signal.SIGKILL
        assert {one.poll() for one in (starter, *others)} == {None}


def test_a_run_that_ends_itself_ends_its_processes_itself(tmp_path: Path) -> None:
    with sleeping(tmp_path / "tests") as process:
        guard = Guard()
        guard.watch(tmp_path / "tests")
        guard.end()
        assert process.poll() is None
