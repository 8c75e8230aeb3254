"""What a worker of one instance or job does in turn: look, do one step, look again, wait. There is
one task for each, so that no two steps for one instance are ever done at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import Final, TypeVar

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
    def show(self) -> None:
        """Show others how it is now."""

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
        """Called when it is done; again, where that fails."""

    async def _run(self) -> None:
        is_over = False
        while not is_over:
            self._wake.clear()
            try:
                is_over = await self._turn()
            except OSError as error:
                self._note_problem(str(error))
                await self._wait_for_news(RETRY_SECONDS)
            except Exception as error:  # that nobody has foreseen: it is no end of its worker
                if repr(error) != self.problem:
                    log.exception("%s can't be looked after", self.name)
                self._note_problem(repr(error))
                await self._wait_for_news(RETRY_SECONDS)

    async def _turn(self) -> bool:
        """Returns whether it was the last one. Raises OSError where the disk or the kernel refuses."""
        if self.is_done:
            self._end.close()
            self.finish()
            return True
        if self.problem:
            self.show()
        seen = await in_thread(self.keeper.look, self.last_seen())
        decided = self.decide(seen)
        if decided.step is Step.WAIT:
            if not self.is_done:
                await self._wait(decided.wake_at)
            return False
        await in_thread(self.do, decided.step, seen)
        self._note_problem("")
        if decided.step is Step.KILL:
            await self._wait(self.around.clock.now() + KILLED_SECONDS)
        return False

    async def _wait(self, until: float) -> None:
        if not self._end.follow(self.keeper.process):
            return  # it has ended since we looked
        await self._wait_for_news(
            None if until == FOREVER else max(until - self.around.clock.now(), 0.0)
        )

    async def _wait_for_news(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _note_problem(self, problem: str) -> None:
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
    """As `asyncio.to_thread`, as a whole. Raises OSError where no thread can be started; then nothing is
    done, also not later by a thread that there is: it stays in their queue."""
    done: futures.Future[T] = futures.Future()

    def do() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits for it
            done.set_exception(error)

    try:
        asyncio.get_running_loop().run_in_executor(None, do)
    except RuntimeError as error:
        if done.cancel():
            raise OSError(errno.EAGAIN, str(error)) from None
    return await as_a_whole(asyncio.wrap_future(done))


async def as_a_whole(step: Awaitable[T]) -> T:
    """Do all of it: who is cancelled, as a client is that leaves, waits for its end."""
    doing = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        if not doing.cancelled() and (error := doing.exception()):
            log.warning("The last step failed: %s", error)
        raise
