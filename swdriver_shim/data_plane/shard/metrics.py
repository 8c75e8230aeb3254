"""What a shard measures of its transfers."""

from __future__ import annotations

from collections.abc import Sequence

from swdriver_shim.data_plane.paths import Direction, PathSpec, TrafficCounter
from swdriver_shim.data_plane.slow_transfers import SlowestTransfers, TransferredColumn


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
