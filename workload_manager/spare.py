"""`python -m workload_manager spare`: a manager that has started, and waits to be told what for.

It reads one line of JSON from its standard input: {"folder", "arguments", "environment"}. Then it does
in that folder what the arguments say, as if it had been started so. At the end of its input it exits:
who would have told it is gone. The Cluster Server keeps one, since most of the time until a manager
runs is Python's.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from telemetry.decoder import decode

# As `cluster_server.processes` has them, which may be of another release: a file that says that it has
# been told, and the log.
BEGUN = "begun"
LOG = "log"
NEVER_TOLD = 125
PR_SET_NAME = 15


class Told(msgspec.Struct, frozen=True):
    folder: str
    arguments: list[str]
    environment: dict[str, str]


def wait(main: Callable[[list[str]], int]) -> int:
    """Become what `main` does with the arguments that come."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return NEVER_TOLD
    told = decode(line, Told)
    os.chdir(told.folder)
    os.environ.clear()
    os.environ.update(told.environment)
    _take_streams()
    _show_name(told.folder)
    Path(BEGUN).touch()
    return main(told.arguments)


def _take_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    log = os.open(LOG, flags, 0o600)
    for source, targets in ((nothing, (0,)), (log, (1, 2))):
        for target in targets:
            os.dup2(source, target)
        os.close(source)


def _show_name(folder: str) -> None:
    """In `top` and `ps -o comm`: its command line tells nobody whose it is."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, Path(folder).name[:15].encode(), 0, 0, 0)
