"""Who watches is told of changes: several of one workload within a moment as one event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final

from cluster_server.backend import NotFound
from cluster_server.history import History
from cluster_server.proto import cluster_pb2 as pb

COALESCE_SECONDS: Final = 0.05  # changes of one workload within it are one event
MINOR_SECONDS: Final = 20.0  # between two events in which nothing but an age is new


class Publisher:
    """`every` workload as it is now, and the one `of` a name, which raises NotFound. `life`: see
    `History`."""

    def __init__(
        self, life: int, every: Callable[[], Iterable[pb.Workload]], of: Callable[[str], pb.Workload]
    ) -> None:
        self.history = History(life, every)
        self._of = of
        self._dirty: dict[str, None] = {}
        self._has_dirty = asyncio.Event()
        self._published_at: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._publish(), name="publish")

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def changed(self, workload: str, *, is_minor: bool = False) -> None:
        if is_minor and time.monotonic() - self._published_at.get(workload, 0.0) <= MINOR_SECONDS:
            return
        self._dirty[workload] = None
        self._has_dirty.set()

    def deleted(self, workload: str) -> None:
        self._dirty.pop(workload, None)
        self._published_at.pop(workload, None)
        self.history.deleted(workload)

    async def _publish(self) -> None:
        while True:
            await self._has_dirty.wait()
            await asyncio.sleep(COALESCE_SECONDS)
            dirty, self._dirty = self._dirty, {}
            self._has_dirty.clear()
            for workload in dirty:
                with contextlib.suppress(NotFound):  # it was deleted meanwhile, which was said
                    self.history.changed(self._of(workload))
                    self._published_at[workload] = time.monotonic()
