"""What the supervisor knows of its services, written down for `status` at every change."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from console.stack.keys import write_private


@dataclass(frozen=True)
class Row:
    """One service.

    `since` is when it entered its state, in seconds of the Unix epoch. `reason`: why it was last started
    again.
    """

    name: str
    state: str
    since: float
    restarts: int
    reason: str = ""
    pid: int | None = None

    @property
    def memory_bytes(self) -> int | None:
        """What it uses itself right now, without the processes it has started."""
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if self.pid is not None:
                return int(psutil.Process(self.pid).memory_info().rss)
        return None


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace what is there. A disk that is full costs the table its freshness and nothing else."""
    with contextlib.suppress(OSError):
        write_private(path, json.dumps([asdict(row) for row in rows]), lasting=False)


def read(path: Path) -> list[Row]:
    """The last that was written; nothing if there was nothing yet."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    return []
