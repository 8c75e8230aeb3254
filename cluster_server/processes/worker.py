"""What a worker of one instance or job does in turn: look, do one step, look again, wait. There is
one task for each, so that no two steps for one instance are ever done at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from cluster_server.processes.core import FOREVER, Next, Seen, Step
from cluster_server.processes.keeper import Keeper
from cluster_server.processes.log_file import LogFile
from cluster_server.processes.surroundings import EndWatch, Surroundings

T = TypeVar("T")

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0  # after the disk or the kernel has refused
KILLED_SECONDS: Final = 0.05  # until the end of what was killed is looked for again


class Worker(ABC):
    log: LogFile

    def __init__(self, name: str, keeper: Keeper, around: Surroundings) -> None:
        self.name = name
        self.keeper = keeper
        self.around = around
        self.problem = ""  # why the last step could not be done
        self._wake = asyncio.Event()
        self._end = EndWatch(self._wake.set)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    def wake(self) -> None:
        self._wake.set()

    async def let_go(self) -> None:
        """Do nothing more for it; what runs goes on. A step that has begun is finished."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled() and (error := self._task.exception()):
                log.error("%s: its worker had failed", self.name, exc_info=error)
        self._end.close()

    @abstractmethod
    def last_seen(self) -> float: ...

    @abstractmethod
    def decide(self, seen: Seen) -> Next:
        """What is next. Also shows others how it is now."""

    @abstractmethod
    def do(self, step: Step, seen: Seen) -> None:
        """In a thread. What it reads of this worker is not changed by others meanwhile, or it does not
        matter which of both it reads: it is looked at again."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether there is nothing more to be done, ever."""

    @abstractmethod
    def finish(self) -> None:
        """Called once, when it is done."""

    async def _run(self) -> None:
        while not self.is_done:
            self._wake.clear()
            try:
                seen = await in_thread(self.keeper.look, self.last_seen())
                decided = self.decide(seen)
                if decided.step is Step.WAIT:
                    if not self.is_done:
                        await self._wait(decided.wake_at)
                    continue
                await in_thread(self.do, decided.step, seen)
                self._show_problem("")
                if decided.step is Step.KILL:
                    await self._wait(self.around.clock.now() + KILLED_SECONDS)
            except OSError as error:
                self._show_problem(str(error))
                await self._wait(self.around.clock.now() + RETRY_SECONDS)
        self._end.close()
        self.finish()

    async def _wait(self, until: float) -> None:
        if not self._end.follow(self.keeper.process):
            return  # it has ended since we looked
        seconds = None if until == FOREVER else max(until - self.around.clock.now(), 0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _show_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.error("%s: %s", self.name, problem)
        self.problem = problem


def rotate(worker: Worker) -> None:
    """In a thread. That of one cannot be rotated is no reason to let others grow."""
    try:
        worker.log.rotate()
    except OSError as error:
        log.warning("The log of %s cannot be rotated: %s", worker.name, error)


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """As `asyncio.to_thread`, as a whole."""
    return await as_a_whole(asyncio.to_thread(function, *arguments))


async def as_a_whole(step: Coroutine[Any, Any, T]) -> T:
    """Do all of it: who is cancelled, as a client is that leaves, waits for its end."""
    doing = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        if not doing.cancelled() and (error := doing.exception()):
            log.warning("The last step failed: %s", error)
        raise
