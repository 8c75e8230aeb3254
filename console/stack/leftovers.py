"""A server that outlived its supervisor must not meet its successor over the same files."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from console.stack.errors import sentences

STOP_SECONDS_MAX = 15.0
KILL_SECONDS_MAX = 5.0
PAUSE_SECONDS = 0.02


def stop_server(
    pid_file: Path,
    directory: Path,
    *,
    names: frozenset[str],
    how: signal.Signals,
    traces: Iterable[Path] = (),
) -> bool:
    """Stop the server with one of `names` that works in `directory`; tell whether there was one.

    Afterwards nothing of it is running, and only then `pid_file` and the other `traces` go, in which
    process ids stand that may be somebody else's by now. PostgreSQL relies on them to notice processes
    of its predecessor that are still attached to the memory that they shared: there are none.

    A process id alone proves nothing, for ids are used again (after a reboot, or in a container, the
    same small number is likely somebody else). Both servers change into their data directory, so that
    is what identifies them and all their children.
    """
    processes = _working_in(directory, names)
    first = _first_line(pid_file)
    for process in processes:
        if str(process.pid) == first:
            send([process], how)
            wait_until_gone(processes, STOP_SECONDS_MAX)
    send(processes, signal.SIGKILL)
    wait_until_gone(processes, KILL_SECONDS_MAX)
    for path in (pid_file, *traces):
        with sentences("remove what a killed server left", path):
            path.unlink(missing_ok=True)
    return bool(processes)


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_until_gone(processes: Sequence[psutil.Process], seconds_max: float) -> None:
    """Until none of them runs, but not for longer.

    They are not our children, so nobody tells us. Whoever has ended and was not yet buried by its
    parent no longer runs; how soon that happens is the business of the machine's first process.
    """
    deadline = time.monotonic() + seconds_max
    while any(is_running(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _working_in(directory: Path, names: frozenset[str]) -> list[psutil.Process]:
    found = []
    where = directory.resolve()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.name() in names and Path(process.cwd()) == where:
                found.append(process)
    return found


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").split("\n", 1)[0].strip()
    except FileNotFoundError:
        return ""
