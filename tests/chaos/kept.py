"""A process that is started again whenever it ends, as systemd does it: nothing else of a supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from console.environment import PROJECT

PAUSE_SECONDS: Final = 0.2
STOP_SECONDS_MAX: Final = 40.0


class Kept:
    """Runs `command` from `start` to `stop`. It leads a session, and what is left of that at its end is
    killed."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], directory: Path
    ) -> None:
        self.name = name
        self.starts = 0
        self.log = directory / f"{name}.out"
        self._alive = directory / f"{name}.alive"
        self._command = list(command)
        self._environment = {**environment, "NOTIFY_FILE": str(self._alive)}
        self._running: subprocess.Popen[bytes] | None = None
        self._ends = threading.Event()
        # The process dies with the thread that started it: see `launcher`.
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        self._thread.start()

    @property
    def ready_pid(self) -> int | None:
        """Of the process that says that it is ready."""
        running = self._running
        return running.pid if running and self._alive.exists() else None

    def stop(self) -> None:
        self._ends.set()
        if (running := self._running) and running.poll() is None:
            running.terminate()
        self._thread.join(STOP_SECONDS_MAX)
        if self._thread.is_alive() and (running := self._running):
            running.kill()
            self._thread.join()

    def _run(self) -> None:
        with self.log.open("ab") as log:
            while not self._ends.is_set():
                self._live(log.fileno())
                self._ends.wait(PAUSE_SECONDS)

    def _live(self, log: int) -> None:
        self.starts += 1
        process = subprocess.Popen(
            self._command,
            cwd=PROJECT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._running = process
        if self._ends.is_set():  # told meanwhile, when there was nobody to tell
            process.terminate()
        process.wait()
        self._running = None
        self._alive.unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
