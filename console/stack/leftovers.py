"""A server that outlived its supervisor must not meet its successor over the same files."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

STOP_SECONDS = 15.0
KILL_SECONDS = 5.0


def stop_server(pid_file: Path, directory: Path, how: signal.Signals) -> bool:
    """Stop the server that wrote `pid_file` and works in `directory`; tell whether there was one.

    A process id alone proves nothing, for ids are used again (after a reboot, or in a container, the
    same small number is likely somebody else). Both servers change into their data directory, so that
    is what identifies them. Afterwards nothing is running there and the file is gone.
    """
    process = _server(pid_file, directory)
    if process:
        for sign, seconds in ((how, STOP_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            try:
                process.send_signal(sign)
                process.wait(seconds)
            except psutil.NoSuchProcess:
                break
            except psutil.TimeoutExpired:
                continue
            else:
                break
    pid_file.unlink(missing_ok=True)
    return process is not None


def _server(pid_file: Path, directory: Path) -> psutil.Process | None:
    try:
        pid = int(pid_file.read_text(encoding="ascii").split("\n", 1)[0])
        process = psutil.Process(pid)
        return process if Path(process.cwd()) == directory.resolve() else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
        return None
