"""Who leads, as PostgreSQL has it: sampled, since elections are over in a second."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import psycopg

from console.beat import LOCK
from console.workloads.leader.election import ORCHESTRATORS
from tests.chaos.scene import Chaos
from tests.chaos.threads import Threads

LOOK_SECONDS: Final = 0.2
HOLDERS: Final = """
SELECT activity.pid FROM pg_locks JOIN pg_stat_activity activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1
  AND (classid::bigint << 32 | objid::bigint) = hashtextextended(%s, 0)
"""
AGE: Final = "SELECT extract(epoch FROM now() - max(at)) FROM alerts_evaluation"
WERE_EVALUATED: Final = "SELECT FROM alerts_evaluation LIMIT 1"


@dataclass
class Reigns:
    """`leaders`: connections that led. `without_seconds`: the longest time in which nobody did."""

    leaders: list[int] = field(default_factory=list)
    without_seconds: float = 0.0
    at_once_max: int = 0
    _led_at: float = field(default_factory=time.monotonic)

    def look(self, holders: list[int], now: float) -> None:
        self.at_once_max = max(self.at_once_max, len(holders))
        self.without_seconds = max(self.without_seconds, now - self._led_at)
        if holders:
            self._led_at = now
        self.leaders += [one for one in holders if one not in self.leaders]


class Leaders(Threads):
    """Looks until the block ends, where rules have been evaluated before. `alerts_age_seconds`: the
    longest time since they last were."""

    def __init__(self, scene: Chaos) -> None:
        self.alerts_age_seconds = 0.0
        self.reigns = {name: Reigns() for name in (LOCK, ORCHESTRATORS)}
        super().__init__(partial(self._look_again_and_again, scene))

    def _look_again_and_again(self, scene: Chaos) -> None:
        with scene.database() as connection:
            while not self.ends.wait(LOOK_SECONDS):
                self._look(connection)

    def _look(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        for name, reigns in self.reigns.items():
            found = connection.execute(HOLDERS, (name,)).fetchall()
            reigns.look([pid for [pid] in found], time.monotonic())
        [[age]] = connection.execute(AGE).fetchall()
        self.alerts_age_seconds = max(self.alerts_age_seconds, float(age))
