"""The last changes of workloads, by version, and those who follow them.

There is one queue for all who watch. Who reads too slowly to find the next change in it begins again
with a snapshot: nobody is waited for, and nobody misses anything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Final

from cluster_server.proto import cluster_pb2 as pb

KEPT: Final = 1024
VERSIONS_OF_A_LIFE: Final = 1 << 40


class History:
    """`life`: a number that grows with each start of the server, so that no version is used twice.
    `snapshot`: all workloads as they are now. Not for use from other threads than the loop's."""

    def __init__(
        self, life: int, snapshot: Callable[[], Iterable[pb.Workload]], kept: int = KEPT
    ) -> None:
        self._first = life * VERSIONS_OF_A_LIFE
        self.version = self._first
        self._snapshot = snapshot
        self._events: deque[pb.Event] = deque(maxlen=kept)
        self._changed = asyncio.Event()

    def changed(self, workload: pb.Workload) -> None:
        self._publish(pb.Event.CHANGED, workload)

    def deleted(self, name: str) -> None:
        self._publish(pb.Event.DELETED, pb.Workload(name=name))

    async def watch(self, since: int) -> AsyncGenerator[pb.Event, None]:
        """See `Backend.watch`."""
        while True:
            # Between here and the wait nothing can happen, unless somebody is told something.
            if not self._knows_all_after(since):
                version = self.version
                for workload in list(self._snapshot()):
                    yield pb.Event(kind=pb.Event.SNAPSHOT, version=version, workload=workload)
                yield pb.Event(kind=pb.Event.COMPLETE, version=version)
                since = version
                continue
            if since == self.version:
                await self._changed.wait()
                continue
            event = self._events[since - self.version]  # from the end: the next one after it
            since = event.version
            yield event

    def _knows_all_after(self, version: int) -> bool:
        return self.version - len(self._events) <= version <= self.version and version >= self._first

    def _publish(self, kind: pb.Event.Kind, workload: pb.Workload) -> None:
        self.version += 1
        self._events.append(pb.Event(kind=kind, version=self.version, workload=workload))
        self._changed.set()
        self._changed = asyncio.Event()
