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


@contextlib.contextmanager
def sleeping(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Of a session of its own, as managers and servers are."""
    environment = {**os.environ, "ITS_FOLDER": f"{folder / 'instances' / 'a'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_has_a_folder_of_a_run_that_was_killed_is_killed(
    tmp_path: Path, how: signal.Signals
) -> None:
    folders = [tmp_path / name for name in ("servers", "tests", "tests-2")]
    with contextlib.ExitStack() as stack:
        server, manager, other = [stack.enter_context(sleeping(folder)) for folder in folders]
        run = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, folders[:2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.enter_context(run)
        assert run.stdout
        assert run.stdout.readline() == b"watched\n"
        run.send_signal(how)
        run.wait()
        wait_until("they are killed", lambda: None not in (server.poll(), manager.poll()))
        assert other.poll() is None


def test_a_run_that_ends_itself_ends_its_processes_itself(tmp_path: Path) -> None:
    with sleeping(tmp_path / "tests") as process:
        guard = Guard()
        guard.watch(tmp_path / "tests")
        guard.end()
        assert process.poll() is None
