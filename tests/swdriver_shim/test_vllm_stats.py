"""What vLLM's metrics are told of our counts, which may become less."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from swdriver_shim.adapters.vllm.engine_driver import EngineDriver
from swdriver_shim.adapters.vllm.stats import EACH_SECONDS, StatsSource, added


class Counted:
    def __init__(self, statistics: object) -> None:
        self.statistics = statistics


class Driver:
    """One of an engine, with the counts of an org and of its loads."""

    def __init__(self) -> None:
        self.hits: dict[str, int] = {}
        self.missed: dict[str, int] = {}
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.scheduling = SimpleNamespace(counts=self.done)
        org = SimpleNamespace(hit_tokens=self.hits, missed_tokens=self.missed)
        statistics = SimpleNamespace(orgs=lambda: [org])
        self._statistics = statistics
        self.attach()

    def attach(self) -> None:
        """With another driver."""
        self.shim = SimpleNamespace(driver_or_none=Counted(self._statistics))


def test_a_hit_that_is_taken_back_is_left_out_of_later_ones() -> None:
    """vLLM ends with a number below zero."""
    driver, now = Driver(), [0.0]
    source = StatsSource(cast("EngineDriver", driver), lambda: now[0])

    def since(**tokens: int) -> Any:
        driver.hits["dram"] = tokens.get("hit", driver.hits.get("dram", 0))
        driver.missed["writing"] = tokens.get("missed", driver.missed.get("writing", 0))
        now[0] += EACH_SECONDS
        return source.since()

    assert since(hit=1216) == {"tokens": {"hit_dram": 1216}}
    assert since(hit=0, missed=1216) == {"tokens": {"missed_writing": 1216}}
    assert since(hit=1000) == {}
    assert since(hit=1500) == {"tokens": {"hit_dram": 284}}
    driver.done["loaded_bytes"] = 7
    assert since() == {"bytes": {"loaded": 7}}
    now[0] += EACH_SECONDS / 2
    driver.done["loaded_bytes"] = 9
    assert source.since() == {}, "not that often"


def test_another_driver_is_counted_from_its_begin() -> None:
    """The identity was given away, and has come back."""
    driver, now = Driver(), [0.0]
    source = StatsSource(cast("EngineDriver", driver), lambda: now[0])

    def since(hit: int) -> Any:
        driver.hits["dram"] = hit
        now[0] += EACH_SECONDS
        return source.since()

    driver.done["loaded_bytes"] = 9
    assert since(5000) == {"tokens": {"hit_dram": 5000}, "bytes": {"loaded": 9}}
    driver.shim = SimpleNamespace(driver_or_none=None)
    assert since(5000) == {}
    driver.attach()
    assert since(30) == {"tokens": {"hit_dram": 30}}, "bytes are the engine's, and go on"


def test_increments_are_added_by_kind() -> None:
    one = {"tokens": {"hit_dram": 1}, "bytes": {"loaded": 2}}
    other = {"tokens": {"hit_dram": 3, "hit_tier2": 4}, "columns": {"refused": 5}}
    assert added(one, other) == {
        "tokens": {"hit_dram": 4, "hit_tier2": 4},
        "bytes": {"loaded": 2},
        "columns": {"refused": 5},
    }
