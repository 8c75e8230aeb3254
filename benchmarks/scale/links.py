"""Links as a fluid: transfers that use a link at the same time have equal shares of it, and each is as
fast as the least of its shares.

All transfers of a replica use the same links in the same proportions, so each replica has one speed.
Transfers begin and end at ticks of a millisecond. One object stands for one direction.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from benchmarks.scale.fleet import Link, Paths
from benchmarks.scale.sizes import GBIT

TICK: Final = 0.001


class Ended(NamedTuple):
    replica: int
    tag: object


class Fluid:
    def __init__(self, names: Sequence[str], gbits: Mapping[Link, float], paths: Paths) -> None:
        self._names, self._gbits = list(names), dict(gbits)
        self.bytes: dict[Link, float] = dict.fromkeys(gbits, 0.0)  # over each link
        self.moved = 0.0  # by all transfers that have ended
        self.active = 0
        self._running = np.zeros(len(names))
        self._served = np.zeros(len(names))  # bytes that one transfer has got since the start
        self._waiting: list[tuple[int, float, object]] = []
        self._heaps: list[list[tuple[float, int, float, object]]] = [[] for _ in names]
        self._since = [0.0] * len(names)  # bytes of ended transfers since paths were set
        self._order = 0
        self._at = 0.0
        self.set_paths(paths)

    def set_paths(self, paths: Paths) -> None:
        """From now on bytes take these. A replica without one moves nothing."""
        self._flush()
        number = {link: at for at, link in enumerate(self._gbits)}
        self._paths = [paths.get(name, {}) for name in self._names]
        pairs = [
            (replica, number[link], share)
            for replica, path in enumerate(self._paths)
            for link, share in path.items()
        ]
        self._replica = np.array([pair[0] for pair in pairs], np.int64)
        self._link = np.array([pair[1] for pair in pairs], np.int64)
        self._share = np.array([pair[2] for pair in pairs])
        self._with_path, self._first = np.unique(self._replica, return_index=True)
        self._rates = np.array(list(self._gbits.values())) * GBIT
        self._set_speeds()

    def begin(self, replica: int, size: float, tag: object) -> None:
        """A transfer of so many bytes, from the next tick on."""
        self._waiting.append((replica, size, tag))
        self.active += 1

    def tick(self, now: float) -> list[Ended]:
        """Those that have ended."""
        self._served += self._speeds * (now - self._at)
        self._at = now
        ended: list[Ended] = []
        for replica in np.flatnonzero(self._running).tolist():
            heap, served = self._heaps[replica], self._served[replica]
            while heap and heap[0][0] <= served:
                _, _, size, tag = heapq.heappop(heap)
                self._since[replica] += size
                self._running[replica] -= 1
                ended.append(Ended(replica, tag))
        self.active -= len(ended)
        if ended or self._waiting:
            for replica, size, tag in self._waiting:
                self._order += 1
                until = float(self._served[replica]) + size
                heapq.heappush(self._heaps[replica], (until, self._order, size, tag))
                self._running[replica] += 1
            self._waiting.clear()
            self._set_speeds()
        return ended

    def drop(self, replica: int) -> list[object]:
        """Forget what a replica is moving. Returns the tags."""
        tags = [one[3] for one in self._heaps[replica]]
        tags += [tag for at, _, tag in self._waiting if at == replica]
        self._waiting = [one for one in self._waiting if one[0] != replica]
        self._heaps[replica] = []
        self._running[replica] = 0
        self.active -= len(tags)
        return tags

    def _set_speeds(self) -> None:
        load = np.bincount(
            self._link, self._share * self._running[self._replica], minlength=self._rates.size
        )
        # A replica that moves nothing uses no link: its speed matters to nobody.
        shares = self._rates[self._link] / np.maximum(load[self._link], 1e-9)
        self._speeds = np.zeros(len(self._names))
        if self._with_path.size:
            self._speeds[self._with_path] = np.minimum.reduceat(shares, self._first)
        self._speeds[self._running == 0] = 0.0

    def _flush(self) -> None:
        for replica, size in enumerate(self._since):
            if size:
                self.moved += size
                for link, share in self._paths[replica].items():
                    self.bytes[link] += size * share
                self._since[replica] = 0.0

    def totals(self) -> tuple[float, dict[Link, float]]:
        """Bytes that have been moved, and how many of them over each link."""
        self._flush()
        return self.moved, dict(self.bytes)
