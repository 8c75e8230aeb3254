"""Being told to stop by a signal: `StopSignal` for what waits in its main thread, `ends_clean` for what
makes something that has to be removed, and `undisturbed` for the step that makes it.

Python calls the handler of a signal between two steps of the main thread, whatever lock that thread has.
So no handler may take one: one that sets the `threading.Event` for which the main thread waits, at the
moment when that has the event's lock, waits for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

STOPS: Final = (signal.SIGTERM, signal.SIGINT)
ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
LEAVE_SECONDS: Final = 4.0  # a few times less than what waits for a process before it is killed
FIRST: Final = 1  # process of a container: the kernel gives it no signal that it does not handle

# When Python ends it takes handlers away, and then an alarm would kill what ends in order.
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.0)

T = TypeVar("T")


def end_as_first_process() -> None:
    """Have SIGTERM end this process at once, as it ends others, where it is the first of a container."""
    if os.getpid() == FIRST and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def exit_within(seconds: float) -> None:
    """End this process so many seconds later, in order or not: it may wait for what has no end. Takes no
    lock, so that a handler may call it."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(os.EX_OK))
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)


class Left(BaseException):
    """What is left in the middle, not to be handled there."""


class StopSignal:
    """Made and waited for by the main thread, which has SIGALRM for it."""

    def __init__(self) -> None:
        self._is_set = False
        self._may_leave = False
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # whose `put` takes no lock
        signal.signal(signal.SIGALRM, self._leave)
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

    def run(self, work: Callable[[], T]) -> T | None:
        """Do work that may be killed at any moment. LEAVE_SECONDS after a signal it is left wherever it
        is, since the server that it waits for may not answer, and None is returned."""
        try:
            self._may_leave = True
            if self._is_set:
                signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS)
            try:
                return work()
            finally:
                self._may_leave = False
        except Left:
            return None

    def _set(self, *_: object) -> None:
        if not self._is_set:
            signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS)
        self._is_set = True
        self._woken.put(None)

    def _leave(self, *_: object) -> None:
        if self._may_leave:
            self._may_leave = False
            raise Left


@contextlib.contextmanager
def ends_clean() -> Iterator[None]:
    """SIGTERM, or a terminal that is closed, ends what is within as Ctrl-C does: it stops the programs
    that it has started, and removes its drafts. A second one does not disturb that, but counts where the
    first one came to nothing: what a handler raises while an object is deleted is dropped.

    Signals that are handled or ignored already are left alone, as below `nohup`. Only the main thread
    can set that: in another one it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {number: signal.getsignal(number) for number in ENDS}
    ours = [number for number, handler in before.items() if handler in (signal.SIG_DFL, _end)]
    raised: list[BaseException] = []

    def end(number: int, _frame: object) -> None:
        if not any(one in raised for one in _handled()):
            raised.append(SystemExit(128 + number))
            raise raised[-1]

    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
        raised.clear()  # they know the frames that know this list


def _handled() -> Iterator[BaseException]:
    """The exception that is handled now, as in `finally`, and those during whose handling it came."""
    error = sys.exception()
    while error is not None:
        yield error
        error = error.__context__


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
