"""Who listens on a port of this machine, as far as /proc tells.

A port that was free when an engine was given it may be somebody else's by the time the engine binds it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
LISTENS: Final = "0A"
# 127.0.0.1 in either byte order, and all addresses of either family.
REACHED: Final = frozenset({"0100007F", "7F000001", "0" * 8, "0" * 32})


def listeners(port: int) -> set[int]:
    """The processes that a connection to this port of 127.0.0.1 may get to. None where it is not known,
    as of other users' processes."""
    found = _sockets(port)
    return set(_holders(found)) if found else set()


def _sockets(port: int) -> set[str]:
    found = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == LISTENS and address in REACHED and int(number, 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _holders(sockets: Collection[str]) -> list[int]:
    found = []
    for process in os.scandir(PROC):
        if not process.name.isdecimal():
            continue
        # It has ended, or is another user's.
        with contextlib.suppress(OSError), os.scandir(f"{process.path}/fd") as files:
            for file in files:
                with contextlib.suppress(OSError):
                    if os.readlink(file.path) in sockets:  # noqa: PTH115 - many, and often
                        found.append(int(process.name))
                        break
    return found
