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
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from cluster_server.processes.kernel import Order

log = logging.getLogger(__name__)

VERB: Final = "spare"
FAILURES_MAX: Final = 3  # in a row: a command that knows no spares is not asked for more
END_SECONDS: Final = 5.0


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
            while len(self._alive()) < self._count:
                self._waiting.append(
                    subprocess.Popen(
                        [*self._command, VERB],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        env=self._environment,
                        start_new_session=True,
                        umask=0o077,
                    )
                )

    def take(self, order: Order) -> subprocess.Popen[bytes] | None:
        """One that can become what is ordered."""
        if tuple(order.command[: len(self._command)]) != self._command:
            return None
        with self._lock:
            return self._waiting.pop(0) if self._alive() else None

    def line(self, order: Order, environment: Mapping[str, str]) -> bytes:
        """What it is told, to become that."""
        told = {
            "folder": str(order.folder),
            "arguments": list(order.command[len(self._command) :]),
            "environment": dict(environment),
        }
        return msgspec.json.encode(told) + b"\n"

    def close(self) -> None:
        with self._lock:
            self._count = 0
            for one in self._waiting:
                assert one.stdin  # noqa: S101 - it is a pipe
                one.stdin.close()
            for one in self._waiting:
                one.wait(END_SECONDS)
            self._waiting.clear()

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        ended = [one for one in self._waiting if one.poll() is not None]
        for one in ended:
            self._waiting.remove(one)
            assert one.stdin  # noqa: S101 - it is a pipe
            one.stdin.close()
        self._failures = self._failures + len(ended) if ended else self._failures
        if self._count and self._failures >= FAILURES_MAX:
            log.warning(
                "`%s %s` ends by itself: managers are started when they are needed, which takes longer",
                " ".join(self._command),
                VERB,
            )
            self._count = 0
        return self._waiting
