"""Whether a process is told to stop, by SIGTERM or SIGINT, for one that waits in its main thread.

Python calls the handler of a signal between two steps of the main thread, whatever lock that thread has.
So no handler may take one: one that sets the `threading.Event` for which the main thread waits, at the
moment when that has the event's lock, waits for ever.
"""

from __future__ import annotations

import contextlib
import queue
import signal
from typing import Final

STOPS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Made and waited for by the main thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # whose `put` takes no lock
        for number in STOPS:
            signal.signal(number, self._set)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait so long, but not after a signal. Returns whether there was one."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._woken.get(timeout=max(0.0, seconds))
        return self._is_set

    def _set(self, *_: object) -> None:
        self._is_set = True
        self._woken.put(None)
