"""A thread that does something when its time has come. Asleep while nothing is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

FOREVER: Final = float("inf")


class Clock:
    def __init__(self, tick: Callable[[], float], name: str) -> None:
        """`tick` is called in a thread of that name when a moment has come that was given to `at`, and
        returns the next one. Moments are of `time.monotonic`."""
        self._tick = tick
        self._next = FOREVER
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def at(self, moment: float) -> None:
        if moment < self._next:
            with self._changed:
                self._next = min(self._next, moment)
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (wait := self._next - time.monotonic()) > 0:
                    self._changed.wait(None if wait == FOREVER else wait)
                if self._stopped:
                    return
                self._next = FOREVER
            self.at(self._tick())
