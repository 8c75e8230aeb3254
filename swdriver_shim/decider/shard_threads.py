"""The shards of all groups, and threads to ask several of them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

from swdriver_shim.data_plane.shard.control import ShardControl

THREADS_MAX: Final = 32

T = TypeVar("T")


class ShardThreads:
    def __init__(self, groups: Sequence[Sequence[ShardControl]]) -> None:
        self.groups = groups
        self.all = [shard for shards in groups for shard in shards]
        self.count = min(THREADS_MAX, len(self.all))
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="shard")

    def each(self, work: Callable[[int, int], T], groups: Iterable[int]) -> dict[tuple[int, int], T]:
        """Call `work` with the group and index of each shard of these groups; the results by those."""
        which = [(group, index) for group in sorted(groups) for index in range(len(self.groups[group]))]
        if len(which) == 1:
            return {which[0]: work(*which[0])}
        futures = {each: self._threads.submit(work, *each) for each in which}
        wait(futures.values())  # even if one fails: the others use the same slots and memory
        return {each: future.result() for each, future in futures.items()}

    def wait_applied(self, until: float, clock: Callable[[], float]) -> bool:
        """Wait until agents have applied every evict so far: what is sent is not there yet. Returns
        whether they have."""
        # One after the other: the threads of shards are for work, not for waiting.
        return all(shard.wait_applied(max(0.0, until - clock())) for shard in self.all)

    def open_lost(self) -> None:
        """Connect to lost shards, all at the same time: each may take seconds."""
        lost = [shard for shard in self.all if not shard.is_open]
        list(self._threads.map(lambda shard: shard.open(), lost))

    def close(self) -> None:
        self._threads.shutdown()
        for shard in self.all:
            shard.close()
