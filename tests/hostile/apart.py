"""Work in a process of its own: attackers, the good tenant and whoever watches share no interpreter.

Processes are forked off one that has imported everything and has no threads, so they begin fast. Each
lasts until nobody needs it any more, and no longer than whoever started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

READY_SECONDS_MAX: Final = 60.0
PRELOADED: Final = ("tests.hostile.attacks", "tests.hostile.tenant")
AUTOGROUP: Final = Path("/proc/self/autogroup")
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOADED))

T = TypeVar("T")


class Failed(AssertionError):
    """There is no result. What the work raised is on standard error."""


class Apart(Generic[T]):
    """`work` begins with `begin`, is told to end by `end`, and its value is what `result` gives.

    It is a function of a module, or a partial of one, whose arguments can be pickled. What it has left
    running goes on until the block ends. `yields`: it takes no processor time that others want.
    `processors`: it runs on these; `is_first`: and waits for nobody there, as if it were alone.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[threading.Event], T],
        *,
        yields: bool = False,
        processors: frozenset[int] | None = None,
        is_first: bool = False,
    ) -> None:
        self.name = name
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_run, args=(theirs, work, processors, yields, is_first), name=name, daemon=True
        )
        self._process.start()
        self.pid = self._process.pid or 0
        theirs.close()

    def __enter__(self) -> Self:
        if not self._pipe.poll(READY_SECONDS_MAX):
            self._stop()
            raise Failed(f"{self.name} does not start.")
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self) -> None:
        self._pipe.send("begin")

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._pipe.send("end")

    def result(self, seconds_max: float) -> T:
        """Raises Failed where there is none, with the reason."""
        if not self._pipe.poll(seconds_max):
            raise Failed(f"{self.name} does not end.")
        try:
            made: T = self._pipe.recv()
        except EOFError:
            raise Failed(f"{self.name} has failed.") from None
        return made

    def _stop(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _run(
    pipe: Connection,
    work: Callable[[threading.Event], object],
    processors: frozenset[int] | None,
    yields: bool,  # noqa: FBT001
    is_first: bool,  # noqa: FBT001
) -> None:
    if processors:
        os.sched_setaffinity(0, processors)
    if is_first:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    if yields:
        _yield_to_others()
    ends = threading.Event()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        ends.set()

    pipe.send("ready")
    try:
        pipe.recv()
    except EOFError:
        return
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    made = work(ends)
    with contextlib.suppress(EOFError, OSError):
        pipe.send(made)
        listening.join()
        pipe.recv()


def _yield_to_others() -> None:
    # Nice tasks keep a processor for a slice when others wake; idle ones make way at once.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Where the kernel groups processes by session, that counts within a group only.
    os.setsid()
    with contextlib.suppress(FileNotFoundError):
        AUTOGROUP.write_text("19")
