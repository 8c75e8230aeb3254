"""What waits to be done for several orgs: each has a queue of its own, and they are served in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

CHUNK: Final = 16  # of one org in a row, where others wait

T = TypeVar("T")


class Rounds(Generic[T]):
    """Of one org, what came first is done first. However much one has waiting, it costs another no more
    than a turn."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[T]] = {}  # whose turn it is comes first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for queue in self._queues.values():
            yield from queue

    def put(self, org: Hashable, item: T) -> None:
        try:
            self._queues[org].append(item)
        except KeyError:
            self._queues[org] = deque((item,))
        self._count += 1

    def put_back(self, org: Hashable, item: T) -> None:
        """Before all else of this org."""
        self._queues.setdefault(org, deque()).appendleft(item)
        self._count += 1

    def take(self, most: int, fits: Callable[[T | None, T], bool]) -> list[T]:
        """Some items, of each org in turn. `fits`: whether the second may go along with the first that
        was taken, which is None if it would be the first itself. An org whose next one does not fit
        keeps its turn."""
        taken: list[T] = []
        before = -1
        while len(taken) < most and len(taken) > before:
            before = len(taken)
            for org in list(self._queues):
                self._take_of(org, min(CHUNK, most - len(taken)), fits, taken)
                if len(taken) == most:
                    break
        self._count -= len(taken)
        return taken

    def _take_of(
        self, org: Hashable, most: int, fits: Callable[[T | None, T], bool], taken: list[T]
    ) -> None:
        queue, before = self._queues[org], len(taken)
        first = taken[0] if taken else None
        for _ in range(min(most, len(queue))):
            if not fits(first, queue[0]):
                break
            taken.append(queue.popleft())
            first = taken[0]
        if len(taken) > before:
            del self._queues[org]
            if queue:
                self._queues[org] = queue  # behind all others
