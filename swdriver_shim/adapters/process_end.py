"""The end of an engine's processes that have a driver, where vLLM does not see to it.

- vLLM's server starts the core of its engine as a process, and stops it when it is told to stop itself.
  A server that is killed stops nothing: its core waits for requests that nobody can send, for as long as
  the machine runs. It would keep its driver's identity, and write to the shards of the next engine.
- Python calls the handler of a signal between two steps of the main thread. If one comes just before
  that thread begins to wait for a lock, as the core does for requests, it is noticed when the wait is
  over. A core that is told to stop right after an answer may go on waiting: it is killed in the end, and
  leaves no snapshot.
"""

from __future__ import annotations

import _thread
import faulthandler
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, TextIO

log = logging.getLogger(__name__)

NAMES: Final = ("EngineCore", "VllmWorker")  # vLLM's names of processes; others are somebody else's
LOOK_SECONDS: Final = 1.0
ORDER_SECONDS: Final = 20.0  # for vLLM to stop in order: its workers have nine
CLOSE_SECONDS: Final = 20.0  # for `close`, if vLLM has not come to it
STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT})
WAKE: Final = signal.SIGURG  # by default it is ignored
WAKE_SECONDS: Final = 0.5


def end_with_parent(close: Callable[[], object]) -> None:
    """Once this process's parent is gone, tell it to stop, as the parent would have. If it has not ended
    after ORDER_SECONDS, call `close`; after CLOSE_SECONDS more it is ended, whatever it does.

    Does nothing in a process that vLLM has not started. `close` may be called although somebody else has
    called it, or does so at the same time.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not _is_vllms():
        return
    # Opened now, since there may be no file left to be opened when it is needed.
    stacks = sys.__stderr__ or os.open(os.devnull, os.O_WRONLY)
    threading.Thread(
        target=_end_with,
        args=(parent, os.getppid(), close, stacks),
        name="tidegate-parent",
        daemon=True,
    ).start()


def _end_with(
    parent: BaseProcess, started_by: int, close: Callable[[], object], stacks: TextIO | int
) -> None:
    # A process that was forked beside this one may hold the pipe that tells. And a parent that was gone
    # before this began is nobody's parent any more.
    number = parent.pid
    assert number is not None  # noqa: S101 - it is not ours to start
    while parent.is_alive() and os.getppid() == started_by and _is_there(number):
        parent.join(LOOK_SECONDS)
    log.warning("Process %s, which has started this one, is gone: the engine is stopped", parent.pid)
    # Not by a thread: in the last part of its end a process has none.
    faulthandler.dump_traceback_later(ORDER_SECONDS + CLOSE_SECONDS, exit=True, file=stacks)
    # Calls the handler, if there is one. vLLM has none once it stops: the signal itself would end this
    # process before its driver is closed.
    _thread.interrupt_main(signal.SIGTERM)
    time.sleep(ORDER_SECONDS)
    log.warning("The engine has not stopped within %.0f s: the driver is closed", ORDER_SECONDS)
    close()


def _is_there(parent: int) -> bool:
    """False as well for one that has ended and was not collected, and where another process has its
    number by now. What can't be read says nothing: no file may be left to be opened, or /proc may hide
    processes."""
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        (state, started), (_, ours) = _state(parent), _state(os.getpid())
    except OSError:
        return True
    return state not in (b"Z", b"X") and started <= ours


def _state(process_id: int) -> tuple[bytes, int]:
    """And when it was started, in ticks. Raises OSError."""
    stat = Path(f"/proc/{process_id}/stat").read_bytes()
    fields = stat.rpartition(b")")[2].split()  # behind the name of the program
    return fields[0], int(fields[19])


def notice_stops() -> None:
    """Have the main thread notice SIGTERM and SIGINT also while it waits for a lock.

    Does nothing in another thread, which can't see to that, nor in a process that vLLM has not started,
    nor where somebody else is told of signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not _is_vllms() or signal.getsignal(WAKE) is not signal.SIG_DFL:
        return
    received, told = os.pipe()
    os.set_blocking(told, False)
    if (others := signal.set_wakeup_fd(told, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(others)
        os.close(received)
        os.close(told)
        return
    awake: queue.SimpleQueue[None] = queue.SimpleQueue()  # which takes signals, as a lock would not
    # Handlers are called in the order of their signals' numbers: that of a stop before this one.
    signal.signal(WAKE, lambda *_: awake.put(None))
    main = threading.get_ident()
    threading.Thread(
        target=_wake, args=(received, main, awake), name="tidegate-signals", daemon=True
    ).start()


def _wake(received: int, main: int, awake: queue.SimpleQueue[None]) -> None:
    while numbers := os.read(received, 64):
        if not STOPS.isdisjoint(numbers):
            while not awake.empty():
                awake.get()
            signal.pthread_kill(main, WAKE)  # ends a wait
            while not _is_told(awake):  # it had not begun yet
                signal.pthread_kill(main, WAKE)


def _is_told(awake: queue.SimpleQueue[None]) -> bool:
    """Within WAKE_SECONDS."""
    try:
        awake.get(timeout=WAKE_SECONDS)
    except queue.Empty:
        return False
    return True


def _is_vllms() -> bool:
    return multiprocessing.current_process().name.startswith(NAMES)
