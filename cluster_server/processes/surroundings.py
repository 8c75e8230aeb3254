"""What all instances and jobs of a backend share."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster_server.processes.core import Limits
from cluster_server.processes.folder import ProcessIdentity
from cluster_server.processes.kernel import Kernel, watch


class Clock:
    """The time of day when it was made, and from then on what has passed: it is never set."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset


@dataclass(frozen=True)
class Surroundings:
    kernel: Kernel
    command: Sequence[str]  # of a manager, to which `run --folder F` is added
    environment: Mapping[str, str]
    shared: Path  # a folder for all processes: weights, artifacts, state of drivers
    host: str = ""
    limits: Limits = field(default_factory=Limits)
    clock: Clock = field(default_factory=Clock)

    def environment_of_processes(self) -> dict[str, str]:
        return {
            **self.environment,
            "MANAGER_STATE_DIR": str(self.shared),
            "TIDEGATE_ARTIFACTS": str(self.shared / "artifacts"),
        }


class EndWatch:
    """Calls back in the loop when a process ends, also one that was started by somebody else."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._process: ProcessIdentity | None = None
        self._descriptor: int | None = None

    def follow(self, process: ProcessIdentity | None) -> bool:
        """Watch this process, and no other one. False if it has ended already."""
        if process == self._process and (process is None or self._descriptor is not None):
            return True
        self.close()
        self._process = process
        if process is None:
            return True
        self._descriptor = watch(process)
        if self._descriptor is None:
            return False
        asyncio.get_running_loop().add_reader(self._descriptor, self._ended)
        return True

    def close(self) -> None:
        self._release()
        self._process = None

    def _ended(self) -> None:
        self._release()
        self._on_end()

    def _release(self) -> None:
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
