"""Managers that are started before anybody knows what for.

Until a manager can start its engine, Python imports it for half a second. A spare has done so: it waits
for a line on its standard input that says which folder is its own, and becomes that manager, under the
same number. Whose server is gone reads the end of its input and exits: a spare is never left over.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

log = logging.getLogger(__name__)

VERB: Final = "spare"
FAILURES_MAX: Final = 3  # in a row: a command that knows no spares is not asked for more


class Spares:
    """Used by any thread. `command`: of a manager, which knows `spare` as `workload_manager.spare` has
    it. `count`: how many wait."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], count: int) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._count = count
        self._failures = 0
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def fill(self) -> None:
        """Start what is missing. Raises OSError."""
        with self._lock:
            self._drop_ended()
            while len(self._waiting) < self._count:
                self._waiting.append(
                    subprocess.Popen(
                        [*self._command, VERB],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        cwd="/",
                        env=self._environment,
                        start_new_session=True,
                        umask=0o077,
                    )
                )

    def take(
        self, folder: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], bytes] | None:
        """One that can become what the command starts, and the line that makes it that."""
        if tuple(command[: len(self._command)]) != self._command:
            return None
        told = {
            "folder": str(folder),
            "arguments": list(command[len(self._command) :]),
            "environment": dict(environment),
        }
        try:
            line = msgspec.json.encode(told) + b"\n"
        except UnicodeError:  # a variable that is no text
            return None
        with self._lock:
            self._drop_ended()
            if not self._waiting:
                return None
            self._failures = 0
            return self._waiting.pop(0), line

    def close(self) -> None:
        """There is nothing that one of them could lose."""
        with self._lock:
            self._count = 0
            for one in self._waiting:
                one.kill()
            self._drop_ended(wait=True)

    def _drop_ended(self, *, wait: bool = False) -> None:
        ended = [one for one in self._waiting if wait or one.poll() is not None]
        for one in ended:
            one.wait()
            assert one.stdin  # noqa: S101 - it is a pipe
            one.stdin.close()
            self._waiting.remove(one)
        self._failures += len(ended)
        if self._count and self._failures >= FAILURES_MAX:
            log.warning(
                "`%s %s` ends by itself: managers are started when they are needed, which takes longer",
                " ".join(self._command),
                VERB,
            )
            self._count = 0
