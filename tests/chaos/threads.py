"""Work in threads that lasts as long as a block, and waiting for what may never be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from tests.live import wait_until


def came_true(holds: Callable[[], object], seconds: float) -> bool:
    """Wait until it holds, for so long at most. What does not is judged with all else that was seen."""
    try:
        wait_until("it holds", holds, seconds)
    except AssertionError:
        return False
    return True


class Threads:
    """Each of `works` runs in a thread until it returns, which it does soon after `ends` is set, at the
    end of the block. What one raises is raised there."""

    def __init__(self, *works: Callable[[], None]) -> None:
        self.ends = threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.set()
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where the block ends
            self._failed.append(error)
