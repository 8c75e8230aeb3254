"""Threads for long work, which orgs take in turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class _Work:
    __slots__ = ("answer", "do")

    def __init__(self, do: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self.do = do
        self.answer = answer


class Lanes:
    """Work of one event loop. What waits is bounded by who asks: each has one piece of work here for
    each of its requests."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokens")
        self._running = 0
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, org: str, do: Callable[[], T]) -> T:
        """Does it in a thread, when it is this org's turn. One that is cancelled while it waits is not
        begun."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(org, deque()).append(_Work(do, answer))
        self._begin()
        return await answer

    def close(self) -> None:
        """Nothing further is begun; who waits is cancelled."""
        for works in self._waiting.values():
            for work in works:
                work.answer.cancel()
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._running < self._threads and self._waiting:
            org, works = next(iter(self._waiting.items()))
            work = works.popleft()
            if works:
                self._waiting.move_to_end(org)  # the others are first
            else:
                del self._waiting[org]
            if work.answer.done():
                continue
            self._running += 1
            loop = work.answer.get_loop()
            done = loop.run_in_executor(self._pool, work.do)
            done.add_done_callback(lambda done, work=work: self._end(done, work))  # type: ignore[misc]

    def _end(self, done: asyncio.Future[Any], work: _Work) -> None:
        self._running -= 1
        if not done.cancelled() and (error := done.exception()) is not None:
            if not work.answer.done():
                work.answer.set_exception(error)
        elif done.cancelled():
            work.answer.cancel()
        elif not work.answer.done():
            work.answer.set_result(done.result())
        self._begin()
