"""Cluster Servers that really run: processes that tests kill."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.cluster_server.requests import FAKE_MANAGER
from tests.processes import Process, start

READY_SECONDS_MAX = 60.0
MARK = "SERVER_OF_THE_TESTS"  # of all that a server starts: its state directory


class ServerProcess:
    """One state directory, and one server at a time."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.state = directory / "state"
        self.target = f"unix:{directory / 'c.sock'}"
        self._directory = directory
        self._options = options
        self._process: Process | None = None

    def start(self) -> None:
        """And wait until it says that it is ready."""
        ready = self._directory / "notify"
        ready.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(str(ready))
            listener.settimeout(READY_SECONDS_MAX)
            with (self._directory / "server.log").open("ab") as log:
                self._process = start(
                    *("cluster_server", "--state", str(self.state)),
                    *("--listen", self.target, "--command", shlex.join(FAKE_MANAGER)),
                    *("--spares", "1", "--boxes", "box-1,box-2", "--cgroups", "none"),
                    *self._options,
                    environment={**os.environ, "NOTIFY_SOCKET": str(ready), MARK: str(self.state)},
                    descriptors={1: log.fileno(), 2: log.fileno()},
                )
            while b"READY=1" not in listener.recv(1000):
                pass

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        assert self._process
        self._process.terminate()
        return self._process.wait(60)

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def write(self, file: str) -> None:
        """An empty file, which a fake job waits for."""
        (self.state / file).touch()

    def log(self) -> str:
        return (self._directory / "server.log").read_text()

    def processes(self) -> list[int]:
        """All that any server of this directory has started and that runs. One that was a spare does not
        show its folder in its environment, but works there."""
        mark = f"TIDEGATE_FOLDER={self.state}/".encode()
        return [
            int(path.name)
            for path in _alive()
            if mark in _environment(path) or _works_in(path).is_relative_to(self.state)
        ]

    def family(self) -> list[int]:
        """The server and all that servers of this directory have started: also a spare, which may have
        been told what to become and not be that yet."""
        mark = f"{MARK}={self.state}\0".encode()
        started = [int(path.name) for path in _alive() if mark in _environment(path)]
        return [self.pid, *started] if self.is_running else started

    def end(self) -> None:
        """With all of its family."""
        if self.is_running:
            self.kill()
        while left := self.family():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _alive() -> list[Path]:
    """All processes, where the kernel shows them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(path)
    return found


def _environment(path: Path) -> bytes:
    try:
        return (path / "environ").read_bytes()
    except OSError:
        return b""


def _works_in(path: Path) -> Path:
    try:
        return (path / "cwd").readlink()
    except OSError:
        return Path()


@contextlib.contextmanager
def server(directory: Path, *options: str) -> Iterator[ServerProcess]:
    made = ServerProcess(directory, *options)
    made.start()
    try:
        yield made
    finally:
        made.end()
