"""Which holder answers in time: one that was late is asked last, until it is known to answer again."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.redundancy.parts.patience import Patience

PROBE_SECONDS: Final = 1.0  # between the probes of one holder, of which one is under way at most


@dataclass(eq=False, slots=True)
class Promptness:
    """Of one holder. Any thread may use it."""

    recalls: Patience = field(default_factory=Patience)  # from its disk to its slots
    refills: Patience = field(default_factory=Patience)  # from its slots to here
    _is_late: bool = False
    _has_answered: bool = True  # since it was late
    _probe_at: float = math.inf
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_late(self) -> bool:
        return self._is_late

    @property
    def rank(self) -> int:
        """The smaller it is, the sooner it is asked: who hangs comes after who is slow."""
        return self._is_late + (self._is_late and not self._has_answered)

    def note_late(self) -> None:
        """It took longer than there was patience."""
        with self._lock:
            if not self._is_late:
                self._is_late, self._probe_at = True, time.monotonic() + PROBE_SECONDS
            self._has_answered = False

    def note_recalled(self, size: int, seconds: float) -> None:
        """It has read so many bytes from its disk."""
        was_prompt = seconds < self.recalls.seconds(size)
        self.recalls.took(size, seconds)
        with self._lock:
            self._has_answered = True
            if was_prompt:
                self._is_late = False

    def note_refilled(self, size: int, seconds: float) -> None:
        """It has sent so many bytes."""
        self.refills.took(size, seconds)

    def begin_probe(self) -> bool:
        """Whether it is time to find out if it answers. Then `end_probe` has to be called."""
        with self._lock:
            if not self._is_late or time.monotonic() < self._probe_at:
                return False
            self._probe_at = math.inf
            return True

    def end_probe(self) -> None:
        with self._lock:
            self._probe_at = time.monotonic() + PROBE_SECONDS
