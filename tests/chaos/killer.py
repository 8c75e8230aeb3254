"""Kills one process after the other with SIGKILL, in an order that follows from a seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.chaos.threads import Threads

TICK_SECONDS: Final = 0.05
PAUSE_SECONDS: Final = (0.5, 3.0)  # between a kill and the next one, if there is one to kill
BACK_SECONDS_MAX: Final = 180.0  # on a machine that does much else


@dataclass(frozen=True)
class Victim:
    """`ready_pid`: its process, if it says that it is ready."""

    kind: str
    name: str
    ready_pid: Callable[[], int | None]


@dataclass
class Outage:
    """From just before a kill until the next process is ready."""

    victim: Victim
    pid: int
    began: float
    ended: float | None = None

    def overlaps(self, began: float, ended: float) -> bool:
        return self.began <= ended and (self.ended is None or began <= self.ended)


class Killer(Threads):
    """Works while the block lasts, and then waits until all are back.

    Never are two of a kind away: the other one has to be ready. Everybody's turn comes before anybody's
    second.
    """

    def __init__(
        self,
        victims: Sequence[Victim],
        seed: int,
        pause_seconds: tuple[float, float] = PAUSE_SECONDS,
    ) -> None:
        super().__init__(self._kill_until_told)
        self.victims = victims
        self.outages: list[Outage] = []
        self._random = random.Random(seed)
        self._deck: list[Victim] = []
        self._pause_seconds = pause_seconds

    def was_away(self, name: str, began: float, ended: float) -> bool:
        """Whether the process of this name was killed, or on its way back, at any time in between."""
        return any(one.overlaps(began, ended) for one in self.outages if one.victim.name == name)

    @property
    def kills(self) -> Counter[str]:
        return Counter(one.victim.name for one in self.outages)

    @property
    def away(self) -> list[Outage]:
        return [one for one in self.outages if one.ended is None]

    def _kill_until_told(self) -> None:
        next_at = time.monotonic()
        while not self.ends.wait(TICK_SECONDS):
            self._note_who_is_back()
            if time.monotonic() >= next_at and (found := self._next()):
                self._kill(*found)
                next_at = time.monotonic() + self._random.uniform(*self._pause_seconds)
        deadline = time.monotonic() + BACK_SECONDS_MAX
        while self.away and time.monotonic() < deadline:
            self._note_who_is_back()
            time.sleep(TICK_SECONDS)

    def _note_who_is_back(self) -> None:
        for outage in self.away:
            if outage.victim.ready_pid() not in (None, outage.pid):
                outage.ended = time.monotonic()

    def _next(self) -> tuple[Victim, int] | None:
        """The first of the deck all of whose kind are ready."""
        if not self._deck:
            self._deck = self._random.sample(self.victims, len(self.victims))
        away = {one.victim.kind for one in self.away}
        for victim in self._deck:
            if victim.kind not in away and (pid := self._pid_if_all_are_ready(victim)):
                self._deck.remove(victim)
                return victim, pid
        return None

    def _pid_if_all_are_ready(self, victim: Victim) -> int | None:
        if all(one.ready_pid() for one in self.victims if one.kind == victim.kind):
            return victim.ready_pid()
        return None

    def _kill(self, victim: Victim, pid: int) -> None:
        outage = Outage(victim, pid, time.monotonic())
        self.outages.append(outage)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended by itself, which is judged by who counts the starts
            self.outages.remove(outage)
