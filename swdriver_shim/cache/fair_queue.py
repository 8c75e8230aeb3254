"""Queues of several orgs, served in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

CHUNK: Final = 16  # items of one org in a row, where others wait

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of one org and kind leave in the order in which they came. However many items an org has
    waiting, they cost another org no more than a turn."""

    def __init__(self) -> None:
        # By kind and org; whose turn it is comes first.
        self._kinds: dict[Hashable, dict[Hashable, deque[T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for queues in self._kinds.values():
            for queue in queues.values():
                yield from queue

    def put(self, org: Hashable, item: T, kind: Hashable = None) -> None:
        try:
            self._kinds[kind][org].append(item)
        except KeyError:
            self._kinds.setdefault(kind, {})[org] = deque((item,))
        self._count += 1

    def put_back(self, org: Hashable, item: T, kind: Hashable = None) -> None:
        """Before all other items of this org and kind."""
        self._kinds.setdefault(kind, {}).setdefault(org, deque()).appendleft(item)
        self._count += 1

    def take(self, most: int, is_due: Callable[[T], bool] | None = None) -> list[T]:
        """Up to `most` items of one kind, of each org in turn. An org whose first item is not due keeps
        its turn."""
        for kind, queues in self._kinds.items():
            if taken := _take(queues, most, is_due):
                del self._kinds[kind]
                if queues:
                    self._kinds[kind] = queues  # behind all others
                self._count -= len(taken)
                return taken
        return []


def _take(queues: dict[Hashable, deque[T]], most: int, is_due: Callable[[T], bool] | None) -> list[T]:
    taken: list[T] = []
    before = -1
    while queues and before < len(taken) < most:
        before = len(taken)
        chunk = CHUNK if len(queues) > 1 else most
        for org, queue in list(queues.items()):
            if some := _take_first(queue, min(chunk, most - len(taken)), is_due):
                taken += some
                del queues[org]
                if queue:
                    queues[org] = queue
    return taken


def _take_first(queue: deque[T], most: int, is_due: Callable[[T], bool] | None) -> list[T]:
    most = min(most, len(queue))
    if is_due is None:
        return [queue.popleft() for _ in range(most)]
    taken: list[T] = []
    while len(taken) < most and is_due(queue[0]):
        taken.append(queue.popleft())
    return taken
