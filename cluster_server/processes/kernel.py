"""Processes, as the backend needs them: started so that none is lost, recognised later, ended as a
whole.

A process is started in three moves. A shell is forked that waits for a line on its standard input, or
a spare is taken that waits for one already; who it is is written to disk; then the line is sent, and it
becomes the command, under the same number. If the server is killed in between, it reads the end of its
input and exits: there is never a process that nobody knows.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, Protocol

from cluster_server.processes import cgroups
from cluster_server.processes.cgroups import Cgroups
from cluster_server.processes.folder import ProcessIdentity
from cluster_server.processes.log_file import PLAIN
from cluster_server.processes.spares import Spares

PROC: Final = Path("/proc")
MARK: Final = "TIDEGATE_FOLDER"  # in the environment of all that belongs to an instance or job
SHELL: Final = "/bin/sh"
BEGUN: Final = "begun"  # a file that says whether the command has ever begun
GO: Final = b"go\n"
WAITS: Final = f'read -r go && [ "$go" = go ] && : > {BEGUN} || exit 125; exec "$@" </dev/null'
KILL_ROUNDS_MAX: Final = 20
ENVIRON_BYTES_MAX: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Order:
    """What is started."""

    folder: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    memory_bytes: int = 0
    cpu_millis: int = 0


class Started(Protocol):
    """A process that waits for being recorded."""

    @property
    def identity(self) -> ProcessIdentity: ...

    def release(self) -> None:
        """Let it become what was ordered."""

    def abandon(self) -> None:
        """It could not be recorded: end it."""


class Kernel(Protocol):
    """What the backend needs of the machine. All methods may be called from any thread, and raise
    OSError."""

    def start(self, order: Order) -> Started:
        """A process for it that waits. If nobody releases it, it ends by itself."""

    def is_running(self, process: ProcessIdentity) -> bool:
        """Whether exactly this process runs. One that has ended and was not collected does not."""

    def exit_status(self, process: ProcessIdentity) -> int | None:
        """Of one that has ended: negative for a signal. None if it is not known, as that of a process
        which another server has started. It is known once."""

    def others(self, folder: Path, process: ProcessIdentity | None) -> list[int]:
        """The processes that belong to the folder, but for this one."""

    def terminate(self, process: ProcessIdentity) -> None:
        """SIGTERM, if it runs."""

    def kill(self, folder: Path, process: ProcessIdentity | None) -> None:
        """SIGKILL to all that belongs to the folder, this process last. What it starts meanwhile ends as
        well."""

    def forget(self, folder: Path, process: ProcessIdentity | None) -> None:
        """Nothing of it runs any more, and it is never started again."""


class LinuxKernel:
    """Linux, with control groups where they can be made.

    Without them what belongs to an instance is found by its environment, which processes inherit, and by
    its session, as long as that is known to be its own."""

    def __init__(self, groups: Cgroups | None = None, spares: Spares | None = None) -> None:
        self._cgroups = groups
        self._spares = spares

    def start(self, order: Order) -> Started:
        environment = {**order.environment, MARK: str(order.folder)}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | PLAIN
        log = os.open(order.folder / "log", flags, 0o600)
        try:
            spares = self._spares
            taken = spares.take(order.folder, order.command, environment) if spares else None
            process, line = taken or (_shell(order, environment, log), GO)
        finally:
            os.close(log)
        stdin, pid = process.stdin, process.pid
        process.returncode = 0  # it is not the object's to wait for: it may outlive the server
        assert isinstance(stdin, io.BufferedWriter)  # noqa: S101 - it is a pipe
        pipe = stdin.detach()
        try:
            group = None
            if self._cgroups:
                name = group_name(order.folder)
                group = self._cgroups.place(name, pid, order.memory_bytes, order.cpu_millis)
            return _Waiting(identity_of(pid, str(group or "")), pipe, line)
        except BaseException:
            _end_waiting(pid, pipe)
            raise

    def is_running(self, process: ProcessIdentity) -> bool:
        return _is(process)

    def exit_status(self, process: ProcessIdentity) -> int | None:
        if _entry(process) is None:  # its number may be that of another child by now
            return None
        try:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:  # another server's, and collected by the system
            return None
        return os.waitstatus_to_exitcode(status) if pid else None

    def others(self, folder: Path, process: ProcessIdentity | None) -> list[int]:
        if group := self._group(folder, process):
            found = cgroups.members(group)
        else:
            found = [pid for pid in _processes() if _belongs(pid, folder, process)]
        alive = [pid for pid in found if _is_alive(pid)]
        return [pid for pid in alive if not (process and pid == process.pid and _is(process))]

    def terminate(self, process: ProcessIdentity) -> None:
        _signal(process.pid, signal.SIGTERM, lambda: _is(process))

    def kill(self, folder: Path, process: ProcessIdentity | None) -> None:
        group = self._group(folder, process)
        if group:
            cgroups.kill(group)
        for _ in range(KILL_ROUNDS_MAX):  # for those that are being forked while we look
            others = self.others(folder, process)
            for pid in others:
                _signal(pid, signal.SIGKILL, partial(_is_member, pid, group, folder, process))
            if not others:
                break
        if process:
            _signal(process.pid, signal.SIGKILL, lambda: _is(process))

    def forget(self, folder: Path, process: ProcessIdentity | None) -> None:
        if group := self._group(folder, process):
            cgroups.remove(group)

    def _group(self, folder: Path, process: ProcessIdentity | None) -> Path | None:
        """The one that the process was put into, perhaps by a server that was elsewhere."""
        if process:
            return Path(process.group) if process.group else None
        return self._cgroups.folder / group_name(folder) if self._cgroups else None


def group_name(folder: Path) -> str:
    """An instance and a job may have the same name."""
    return f"{folder.parent.name}-{folder.name}"


def _shell(order: Order, environment: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [SHELL, "-c", WAITS, "starting", *order.command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        cwd=order.folder,
        env=environment,
        start_new_session=True,
        umask=0o077,
    )


class _Waiting:
    def __init__(self, identity: ProcessIdentity, pipe: io.RawIOBase, line: bytes) -> None:
        self.identity = identity
        self._pipe = pipe
        self._line = line

    def release(self) -> None:
        with self._pipe, contextlib.suppress(BrokenPipeError):  # its end is noticed as any other
            left = memoryview(self._line)
            while left:
                left = left[self._pipe.write(left) or 0 :]

    def abandon(self) -> None:
        _end_waiting(self.identity.pid, self._pipe)


def _end_waiting(pid: int, pipe: io.RawIOBase) -> None:
    """A child of ours that has never been told anything."""
    pipe.close()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def watch(process: ProcessIdentity) -> int | None:
    """A descriptor that can be read when the process has ended; None if it has already."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if _is(process):
        return descriptor
    os.close(descriptor)
    return None


def identity_of(pid: int, group: str = "") -> ProcessIdentity:
    """Its keeper notes by which clock it was started when. Raises ProcessLookupError."""
    if (found := _stat(pid)) is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return ProcessIdentity(pid, found.started_ticks, boot(), group=group)


@cache
def boot() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    session: int
    started_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of the program, in parentheses, may have any character in it.
    fields = text.rpartition(b")")[2].split()
    return _Stat(fields[0].decode(), int(fields[3]), int(fields[19]))


def _is_alive(pid: int) -> bool:
    found = _stat(pid)
    return found is not None and found.state not in ("Z", "X")


def _entry(process: ProcessIdentity) -> _Stat | None:
    """Of exactly this process, also if it has ended and was not collected. None once it is gone, whoever
    has its number."""
    found = _stat(process.pid) if process.boot == boot() else None
    return found if found and found.started_ticks == process.started_ticks else None


def _is(process: ProcessIdentity) -> bool:
    found = _entry(process)
    return found is not None and found.state not in ("Z", "X")


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir(PROC) if name.isdecimal())  # noqa: PTH208 - many, and often


def _belongs(pid: int, folder: Path, process: ProcessIdentity | None) -> bool:
    """By its environment; for those that have overwritten it, by the session that the first process has
    opened."""
    mark = f"{MARK}={folder}".encode()
    try:
        with (PROC / str(pid) / "environ").open("rb") as file:
            environment = file.read(ENVIRON_BYTES_MAX)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        environment = b""  # another user's, or it has ended
    if mark in environment.split(b"\0"):
        return True
    return process is not None and _is_in_session(pid, folder, process)


def _is_in_session(pid: int, folder: Path, process: ProcessIdentity) -> bool:
    """The session's number is nobody else's as long as there is somebody in it. After that another
    process may have it, and may open a session of its own, with the same number."""
    found = _stat(pid) if process.boot == boot() else None
    if found is None or found.session != process.pid or found.started_ticks < process.started_ticks:
        return False
    if _stat(process.pid) is not None:
        return _entry(process) is not None
    # Whoever opened it is gone, as after a daemon's start. What works in our folder is ours; the rest
    # may be a stranger's, and is left alone.
    return _works_in(pid, folder)


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return (PROC / str(pid) / "cwd").samefile(folder)
    except OSError:  # another user's, or it has ended
        return False


def _is_member(pid: int, group: Path | None, folder: Path, process: ProcessIdentity | None) -> bool:
    return pid in cgroups.members(group) if group else _belongs(pid, folder, process)


def _signal(pid: int, number: int, still_holds: Callable[[], bool]) -> None:
    """Signal exactly the process for which that holds, and not the next one with its number."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if still_holds():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
