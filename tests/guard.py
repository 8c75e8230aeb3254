"""Ends what a killed test run leaves behind: `python -m tests.guard`, told folders of the run on its
standard input, one a line.

Managers outlive the Cluster Server that has started them, by design, and servers are in sessions of
their own. So where a run ends without a word, as by `timeout`, this kills all processes that have one of
its folders in their environment, and have begun after this one. Variables that the run was started with
do not count: who started it has them too, and the next run that it starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

DONE: Final = ""  # the run has ended what it started
QUIET_SECONDS: Final = (
    1.0  # for which nothing has to be found: what is killed may just have started more
)
PAUSE_SECONDS: Final = 0.1
# Variables of shells, which say where somebody is: that may look at a folder of the run.
PLACES: Final = (b"PWD=", b"OLDPWD=")
PROJECT: Final = Path(__file__).parent.parent


class Guard:
    """Our end of it. It is told by a pipe, whose end it notices whatever we die of."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.guard"],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
            env=_started_with(),
        )

    def watch(self, folder: Path) -> None:
        """Processes that have a path in this folder in their environment are the run's."""
        self._tell(f"{folder}")

    def end(self) -> None:
        self._tell(DONE)
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")


def main() -> None:
    folders = set[bytes]()
    for line in sys.stdin:
        if line.rstrip("\n") == DONE:
            return
        folders.add(os.fsencode(line.rstrip("\n")))
    quiet_since = time.monotonic()
    while time.monotonic() < quiet_since + QUIET_SECONDS:
        if kill_all(folders):
            quiet_since = time.monotonic()
        time.sleep(PAUSE_SECONDS)


def kill_all(folders: Collection[bytes]) -> int:
    """Returns how many processes there were."""
    count, since, starters = 0, _begun_at(os.getpid()), _variables(os.getpid())
    for pid in _processes():
        # Suppressed: it has ended, or is another user's.
        with contextlib.suppress(OSError), _opened(pid) as process:
            if _begun_at(pid) >= since and _is_any_in(_variables(pid) - starters, folders):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                count += 1
    return count


def _processes() -> list[int]:
    every = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in every if pid != os.getpid()]


def _begun_at(pid: int) -> int:
    """In ticks since the machine was started."""
    after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    return int(after_name.split()[19])


def _started_with() -> dict[str, str]:
    """The environment that this process was started with."""
    return dict(os.fsdecode(one).split("=", 1) for one in _variables(os.getpid()) if b"=" in one)


def _variables(pid: int) -> set[bytes]:
    """As the process was started with them."""
    return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def _is_any_in(variables: Collection[bytes], folders: Collection[bytes]) -> bool:
    """Whether one has a path in one of the folders. Where only the beginning of a name is the same, it
    has none: pytest counts its folders."""
    return any(
        folder + b"/" in one or one.endswith(folder)
        for one in variables
        if not one.startswith(PLACES)
        for folder in folders
    )


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int]:
    """So that no other process is killed that gets its number."""
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


if __name__ == "__main__":
    main()
