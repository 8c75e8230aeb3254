"""Print to a terminal without ever waiting for it.

A terminal stands still when somebody presses Ctrl-S, a pipe when its reader does, and both can vanish.
The supervisor must go on: its processes wait for it to read what they say.
"""

from __future__ import annotations

import contextlib
import queue
import threading

from rich.console import Console, RenderableType
from rich.text import Text

QUEUE_MAX = 5_000
CLOSE_SECONDS_MAX = 2.0


class SteadyConsole(Console):
    """A console that leaves it to us what a broken pipe means; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Printer:
    """A thread that prints what it is given, in order. What it has no room for is counted and told."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._queue: queue.Queue[RenderableType | None] = queue.Queue(QUEUE_MAX)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def print(self, what: RenderableType) -> None:
        if self._lost and not self._queue.full():
            lost, self._lost = self._lost, 0
            self.print(Text(f"({lost} lines are not shown here, but are in the logs)"))
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Print what is left, if anybody takes it within a moment."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS_MAX)
            self._thread.join(CLOSE_SECONDS_MAX)

    def _run(self) -> None:
        gone = False
        while (what := self._queue.get()) is not None:
            if gone:
                continue
            try:
                # A log line is the terminal's to wrap, so that it can be copied whole.
                self.console.print(what, soft_wrap=isinstance(what, Text))
            except (OSError, ValueError):  # the terminal is gone, or the pipe is closed
                gone = True
