"""A server that outlived its supervisor must not meet its successor over the same files."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil

from console.stack.errors import sentences

STOP_SECONDS_MAX = 15.0
KILL_SECONDS_MAX = 5.0


def stop_server(pid_file: Path, directory: Path, *, names: frozenset[str], how: signal.Signals) -> bool:
    """Stop the server with one of `names` that works in `directory`; tell whether there was one.

    Afterwards nothing of it is running, and only then `pid_file` goes: PostgreSQL reads there whether
    a process of its predecessor is still attached to the memory that they shared.

    A process id alone proves nothing, for ids are used again (after a reboot, or in a container, the
    same small number is likely somebody else). Both servers change into their data directory, so that
    is what identifies them and all their children.
    """
    processes = _working_in(directory, names)
    first = _first_line(pid_file)
    for process in processes:
        if str(process.pid) == first:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                process.send_signal(how)
                process.wait(STOP_SECONDS_MAX)
    stubborn = [process for process in processes if process.is_running()]
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=KILL_SECONDS_MAX)
    with sentences("remove what a killed server left", pid_file):
        pid_file.unlink(missing_ok=True)
    return bool(processes)


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
