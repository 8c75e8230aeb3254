"""Threads and waiting of a store of tier 2."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from kvss_agent.tier2.backend import Failed

IN_FLIGHT_MAX: Final = 4096  # spills and recalls; more are refused
RUN_BYTES: Final = 1 << 20  # of slots that a thread takes at a time


class SlotItem(Protocol):
    """One column of a batch: its slot, and why it failed."""

    slot: memoryview
    failed: Failed | None


_T = TypeVar("_T")
_Item = TypeVar("_Item", bound=SlotItem)


class Execution:
    """Pools of threads, and an event for whatever changes. Belongs to one event loop."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # Recalls, which somebody waits for, do not queue behind spills, which nobody does.
        self.reads = ThreadPoolExecutor(threads, "tier2-read")
        self.writes = ThreadPoolExecutor(threads, "tier2-write")
        # Nor does what is in front of the store, or is only looked for, wait for what the store reads.
        self.front_reads = ThreadPoolExecutor(threads, "tier2-front-read")
        self.looks = ThreadPoolExecutor(threads, "tier2-look")
        self.in_flight = 0
        self.change = asyncio.Event()

    async def close(self) -> None:
        """Wait for what is running, then end the threads."""
        await self.until(lambda: not self.in_flight)
        for pool in (
            self.reads,
            self.writes,
            self.front_reads,
            self.looks,
        ):  # not here: a thread may be at it that nobody waits for
            await asyncio.to_thread(pool.shutdown)

    async def run(self, pool: ThreadPoolExecutor, call: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    def runs(self, items: Sequence[_Item]) -> list[Sequence[_Item]]:
        """What a thread takes at a time: small columns by the dozen, if each thread has as many."""
        each = max(1, RUN_BYTES // max(len(item.slot) for item in items))
        each = min(each, -(-len(items) // self.threads))
        return [items[start : start + each] for start in range(0, len(items), each)]

    async def run_in_threads(
        self,
        pool: ThreadPoolExecutor,
        call: Callable[[Sequence[_Item]], None],
        runs: Sequence[Sequence[_Item]],
    ) -> None:
        """Call this for each, in a few threads; each takes the next one when it is done with one.

        A hop to a thread and back costs as much as a small file, so the loop is woken by the last thread
        only. Returns when no thread is at it.
        """
        left = iter(runs)  # `next` of a list's iterator is one step of the interpreter

        def do() -> None:
            for run in left:
                try:
                    call(run)
                except Failed as failed:
                    for item in run:
                        item.failed = failed

        loop, over = asyncio.get_running_loop(), asyncio.Event()
        ended, threads = itertools.count(1), min(self.threads, len(runs))

        def end(_: object) -> None:
            if next(ended) == threads and not loop.is_closed():
                loop.call_soon_threadsafe(over.set)

        futures = [pool.submit(do) for _ in range(threads)]
        for future in futures:
            future.add_done_callback(end)
        await over.wait()
        for future in futures:
            future.result()  # raises what nobody foresaw

    async def as_admitted(
        self,
        items: Sequence[_Item],
        admit: Callable[[Sequence[_Item]], tuple[list[_Item], list[_Item]]],
        act: Callable[[list[_Item]], Coroutine[object, object, None]],
    ) -> None:
        """Act on those that are admitted, and on the others as soon as they are: `admit` says which are
        now, and which have to wait for somebody to finish."""
        admitted, waiting = admit(items)
        while waiting and not admitted:
            await self.change.wait()
            admitted, waiting = admit(waiting)
        if waiting:  # beside what is admitted: a purge would be over when that has ended
            await gather_whole(act(admitted), self.as_admitted(waiting, admit, act))
        elif admitted:
            await act(admitted)

    def room(self) -> int:
        return max(0, IN_FLIGHT_MAX - self.in_flight)

    async def uninterrupted(self, work: Coroutine[object, object, _T], columns: int = 1) -> _T:
        """Do this to its end, even if who waits for it is cancelled: a thread cannot be called back."""
        self.in_flight += columns
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # nobody will ask for it any more
            raise
        finally:
            self.in_flight -= columns
            self.changed()

    def changed(self) -> None:
        """Wake whoever waits for something to end."""
        change, self.change = self.change, asyncio.Event()
        change.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self.change.wait()


async def gather_whole(*work: Coroutine[object, object, None]) -> None:
    """Do these at once, and all of them to their end, whatever becomes of one."""
    tasks = [asyncio.ensure_future(one) for one in work]
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()
