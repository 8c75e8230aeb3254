"""Being told to stop by a signal: `StopSignal` for what waits in its main thread, `ends_clean` for what
makes something that has to be removed, and `undisturbed` for the step that makes it.

Python calls the handler of a signal between two steps of the main thread, whatever lock that thread has.
So no handler may take one: one that sets the `threading.Event` for which the main thread waits, at the
moment when that has the event's lock, waits for ever.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from typing import Final

STOPS: Final = (signal.SIGTERM, signal.SIGINT)
ENDS: Final = (signal.SIGTERM, signal.SIGHUP)


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


@contextlib.contextmanager
def ends_clean() -> Iterator[None]:
    """SIGTERM, or a terminal that is closed, ends what is within as Ctrl-C does: it stops the programs
    that it has started, and removes its drafts. A second one does not disturb that.

    Signals that are handled or ignored already are left alone, as below `nohup`. Only the main thread
    can set that: in another one it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ours = [number for number in ENDS if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: object) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A signal that comes within is handled at the end. For `Popen`: what a handler raises in there
    loses a process that has begun. In other threads than the main one, which handles signals, it does
    nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    came: list[int] = []
    handled = [number for number in (*STOPS, signal.SIGHUP) if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda its, _: came.append(its)) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)
