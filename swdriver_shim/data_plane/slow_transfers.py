"""What a shard measures of its transfers, and the slowest: what explains the slow end of a histogram.

A transfer is one batch of columns of one org, out to the home of a shard or in from it. Of each org and
direction a few are kept until they are taken: no tokens and no keys, only slots and the path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, Self

from swdriver_shim.data_plane.paths import Direction, PathSpec, TrafficCounter

KEPT_PER_ORG: Final = 2  # of each org and direction
ORGS_MAX: Final = 64  # and directions; later ones are kept after the next take


class TransferredColumn(Protocol):
    """One column of a batch."""

    @property
    def slot(self) -> int: ...
    @property
    def tag(self) -> bytes: ...


class SlowTransfer(NamedTuple):
    """One transfer. `tag` stands for the org; `path` is None if it is not known."""

    at: float  # seconds since 1970 when it was over
    seconds: float
    direction: Direction
    tag: bytes
    request: str
    slot_first: int
    slot_last: int
    columns: int
    size: int  # bytes
    path: PathSpec | None


class SlowestTransfers:
    """All methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[Direction, bytes], list[SlowTransfer]] = {}  # the fastest of them first

    def note(
        self,
        direction: Direction,
        seconds: float,
        columns: Sequence[TransferredColumn],
        size: int,
        path: PathSpec | None,
        request: str,
    ) -> None:
        """Note a transfer of one column or more, if it is slow enough. Nearly all are not."""
        key = direction, columns[0].tag
        kept = self._kept.get(key)
        if kept and len(kept) == KEPT_PER_ORG and seconds <= kept[0].seconds:
            return
        slots = [column.slot for column in columns]
        slow = SlowTransfer(
            self._clock(),
            seconds,
            direction,
            columns[0].tag,
            request,
            min(slots),
            max(slots),
            len(slots),
            size,
            path,
        )
        with self._lock:
            kept = self._kept.get(key, [])
            if not kept and len(self._kept) >= ORGS_MAX:
                return
            # A new list, since others read the old one without the lock.
            self._kept[key] = sorted([*kept, slow], key=_seconds)[-KEPT_PER_ORG:]

    def take(self) -> list[SlowTransfer]:
        """The slowest transfers since the last call."""
        with self._lock:
            kept, self._kept = self._kept, {}
        return [slow for each in kept.values() for slow in each]


def _seconds(slow: SlowTransfer) -> float:
    return slow.seconds


class TransferMetrics:
    """Bytes and seconds by path, and the slowest transfers. May be used from any thread."""

    def __init__(self) -> None:
        self.traffic = TrafficCounter()
        self.slowest = SlowestTransfers()

    def record(
        self,
        direction: Direction,
        path: PathSpec | None,
        seconds: float,
        columns: Sequence[TransferredColumn],
        size: int,
        request: str,
    ) -> None:
        """Record one batch of columns, of one org, with so many bytes in all."""
        if size:
            self.traffic.add(path, direction, size, seconds)
            self.slowest.note(direction, seconds, columns, size, path, request)


class _Portion(NamedTuple):
    path: PathSpec | None
    began: float
    ended: float
    columns: Sequence[TransferredColumn]
    size: int


class PortionedTransfer:
    """A transfer in, of one request, that is read in portions. At the end of the `with` it is recorded
    as one, from the start of its first portion to the end of its last; by path, if it had several."""

    def __init__(
        self, metrics: TransferMetrics, request: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._metrics = metrics
        self._request = request
        self._clock = clock
        self._portions: list[_Portion] = []

    def add(
        self, path: PathSpec | None, seconds: float, columns: Sequence[TransferredColumn], size: int
    ) -> None:
        """Add a portion that has just ended. From any thread."""
        now = self._clock()
        self._portions.append(_Portion(path, now - seconds, now, columns, size))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for path in dict.fromkeys(one.path for one in self._portions):
            mine = [one for one in self._portions if one.path == path]
            seconds = max(one.ended for one in mine) - min(one.began for one in mine)
            columns = [column for one in mine for column in one.columns]
            size = sum(one.size for one in mine)
            self._metrics.record("in", path, seconds, columns, size, self._request)
