"""What the connector has done since the last call, as vLLM's statistics.

vLLM takes them from the scheduler's process to the process that logs and serves its metrics. The
driver's API, where there is one, has the same counts and more, by org.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from swdriver_shim.adapters.vllm.engine_driver import EngineDriver

EACH_SECONDS: Final = 1.0
Counts = dict[str, dict[str, int]]  # by what is counted, and of which kind
MEANING: Final = {
    "tokens": "Tokens that Tidegate was asked for: hits by tier, misses by reason.",
    "bytes": "Bytes loaded into blocks and saved from blocks.",
    "columns": "Columns that failed to load or to save.",
    "requests": "Requests that were not cached, by reason.",
}


class StatsSource:
    """All counts, as increments, which are never negative: vLLM would end. A hit that is taken back,
    since its load failed, is left out of those that come later. Tokens are counted by the driver, and
    from 0 by another one."""

    def __init__(self, deciding: EngineDriver, clock: Callable[[], float] = time.monotonic) -> None:
        self._deciding = deciding
        self._clock = clock
        self._asked_at = clock()
        self._told: Counts = {}
        self._driver: Callable[[], object] = lambda: None  # whose tokens were told

    def since(self) -> Counts:
        """The increments since the last call; nothing if that was less than a second ago."""
        now = self._clock()
        if now < self._asked_at + EACH_SECONDS:
            return {}
        self._asked_at = now
        found: Counts = {}
        for of, counts in self._now().items():
            told = self._told.setdefault(of, {})
            for kind, count in counts.items():
                if (more := count - told.get(kind, 0)) > 0:
                    found.setdefault(of, {})[kind] = more
                    told[kind] = count
        return found

    def _now(self) -> Counts:
        deciding = self._deciding
        done = deciding.scheduling.counts
        tokens: dict[str, int] = {}
        driver = deciding.shim.driver_or_none
        if driver is not None and driver is not self._driver():
            self._told.pop("tokens", None)
            self._driver = weakref.ref(driver)
        for org in driver.statistics.orgs() if driver else ():
            for tier, count in org.hit_tokens.items():
                tokens[f"hit_{tier}"] = tokens.get(f"hit_{tier}", 0) + count
            for reason, count in org.missed_tokens.items():
                tokens[f"missed_{reason}"] = tokens.get(f"missed_{reason}", 0) + count
        return {
            "tokens": tokens,
            "bytes": {"loaded": done["loaded_bytes"], "saved": done["saved_bytes"]},
            "columns": {"refused": done["refused_columns"], "not_saved": done["not_saved_columns"]},
            "requests": dict(deciding.refused),
        }


def added(one: Counts, other: Counts) -> Counts:
    """The sum of two increments."""
    return {
        of: {
            kind: one.get(of, {}).get(kind, 0) + other.get(of, {}).get(kind, 0)
            for kind in {**one.get(of, {}), **other.get(of, {})}
        }
        for of in {**one, **other}
    }
