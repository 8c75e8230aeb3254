"""What the parts of one shard's fragments share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.layout import SLOTS
from kvss_agent.redundancy.parts.holders import Holders
from kvss_agent.redundancy.parts.incomplete import Incomplete

AT_ONCE: Final = SLOTS // 4  # files of one call that are on their way together


class Slots:
    """Slots of the fragment shards that nobody uses, the same ones at each holder."""

    def __init__(self) -> None:
        self._free = [*range(SLOTS)]
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[list[int]]:
        """So many, once they are free."""
        with self._freed:
            self._freed.wait_for(lambda: len(self._free) >= count)
            taken = [self._free.pop() for _ in range(count)]
        try:
            yield taken
        finally:
            with self._freed:
                self._free += taken
                self._freed.notify_all()


class Count:
    """Of something since the start. Any thread may add to it."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, count: int = 1) -> None:
        with self._lock:
            self.value += count


@dataclass(frozen=True, slots=True)
class State:
    """Any thread may use it."""

    code: ErasureCode
    holders: Holders
    namespace: bytes
    part: str
    file_bytes_max: int
    slots: Slots = field(default_factory=Slots)
    incomplete: Incomplete = field(default_factory=Incomplete)
    repaired: Count = field(default_factory=Count)  # files whose missing fragments were made again
    parity_reads: Count = field(default_factory=Count)  # files that were made with parity
