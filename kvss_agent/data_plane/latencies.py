"""How long evicts and refills of a shard take, and what they cost."""

from __future__ import annotations

import threading
import time

from telemetry.histogram import Histogram


class Latencies:
    """How long evicts and refills take, of one shard. Locked: several connections record."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.evict = Histogram()
        self.refill = Histogram()
        self.evicted_bytes = 0
        self.refilled_bytes = 0
        self._ended_cpu_seconds = 0.0
        self._clocks: dict[int, int] = {}

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the threads that serve this shard's connections, those that are gone included."""
        with self._lock:
            return self._ended_cpu_seconds + sum(map(time.clock_gettime, self._clocks.values()))

    def count_this_thread(self) -> None:
        """From now on its CPU time is the shard's. To be called by a thread that has just begun."""
        thread = threading.get_ident()
        with self._lock:
            self._clocks[thread] = time.pthread_getcpuclockid(thread)

    def this_thread_ends(self) -> None:
        with self._lock:
            if self._clocks.pop(threading.get_ident(), None) is not None:
                self._ended_cpu_seconds += time.thread_time()

    def record_evicts(self, seconds: float, columns: int, size: int) -> None:
        """A batch took so long: each of its columns did."""
        with self._lock:
            self.evict.record(seconds, columns)
            self.evicted_bytes += size

    def record_refills(self, seconds: float, columns: int, size: int) -> None:
        with self._lock:
            self.refill.record(seconds, columns)
            self.refilled_bytes += size
