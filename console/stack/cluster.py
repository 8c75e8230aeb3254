"""The Cluster Server of a stack: where it is, and what a killed one has left."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from cluster_server.processes.folder import Folder, ProcessIdentity
from cluster_server.processes.kernel import LinuxKernel
from console.stack.endpoint import SOCKET_PATH_BYTES_MAX
from console.stack.errors import sentences
from console.stack.leftovers import KILL_SECONDS_MAX, PAUSE_SECONDS

END_SECONDS: Final = 20  # for instances whose requests still run


def folder(state: Path) -> Path:
    return state / "cluster"


def socket(state: Path) -> Path:
    return folder(state) / "cluster.sock"


def url(state: Path) -> str:
    """For the console; empty if no socket can have this path."""
    path = str(socket(state))
    is_short = len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX
    return f"unix://{path}" if is_short and not set(path) & set("%,?# ") else ""


def end_leftovers(state: Path) -> list[str]:
    """End instances and jobs that a killed Cluster Server has left; the names of those that ran. The
    next server starts those again that are wanted. No server may run."""
    kernel, ended = LinuxKernel(), []
    for kind in ("instances", "jobs"):
        for path in sorted((folder(state) / kind).glob("[!.]*")):
            with sentences("end what a killed Cluster Server left", path):
                process = Folder(path).process()
                if (process and kernel.is_running(process)) or kernel.others(path, process):
                    kernel.kill(path, process)
                    ended.append(path.name)
                    _wait_until_gone(kernel, process)
    return ended


def _wait_until_gone(kernel: LinuxKernel, process: ProcessIdentity | None) -> None:
    """It was killed, and holds a lock until it has ended."""
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while process and kernel.is_running(process) and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
