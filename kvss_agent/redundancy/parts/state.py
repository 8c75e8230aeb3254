"""What the parts of one shard's fragments share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.layout import SLOTS
from kvss_agent.redundancy.parts.holders import Holders
from kvss_agent.redundancy.parts.incomplete import Incomplete
from kvss_agent.redundancy.parts.patience import Hedges

AT_ONCE: Final = SLOTS // 4  # files of one call that are on their way together

LateCall = Future[Any]


class Slots:
    """Slots of the fragment shards that nobody uses, the same ones at each holder.

    A slot is given back while a holder may still fill it for a request that nobody waits for any more:
    a *late* call. Who takes it next asks that holder for nothing before the call has ended. So no answer
    is about another fragment than the one that was asked for.
    """

    def __init__(self) -> None:
        self._free = [*range(SLOTS)]
        self._late: dict[int, set[tuple[int, LateCall]]] = {}  # by slot, and the place of each
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, count: int, *, also_late: bool = False) -> Iterator[list[int]]:
        """So many, once they are free. `also_late`: where a holder is late, if there are no others."""
        with self._freed:
            self._freed.wait_for(lambda: len(self._usable(also_late=also_late)) >= count)
            taken = self._usable(also_late=also_late)[:count]
            self._free = [slot for slot in self._free if slot not in taken]
        try:
            yield taken
        finally:
            with self._freed:
                self._free += taken
                self._freed.notify_all()

    def keep_late(self, slot: int, place: int, call: LateCall) -> None:
        """This call of the slot at this place goes on, and nobody waits for it."""
        entry = place, call
        with self._freed:
            self._late.setdefault(slot, set()).add(entry)
        call.add_done_callback(lambda _: self._has_ended(slot, entry))

    def late_calls(self, slot: int, place: int) -> list[LateCall]:
        with self._freed:
            return [call for at, call in self._late.get(slot, ()) if at == place]

    def _usable(self, *, also_late: bool) -> list[int]:
        late = [slot for slot in self._free if slot in self._late]
        return [slot for slot in self._free if slot not in self._late] + (late if also_late else [])

    def _has_ended(self, slot: int, entry: tuple[int, LateCall]) -> None:
        with self._freed:
            self._late[slot].discard(entry)
            if not self._late[slot]:
                del self._late[slot]
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
    hedges: Hedges = field(default_factory=Hedges)
    incomplete: Incomplete = field(default_factory=Incomplete)
    repaired: Count = field(default_factory=Count)  # files whose missing fragments were made again
    parity_reads: Count = field(default_factory=Count)  # files that were made with parity
