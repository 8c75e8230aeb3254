"""What vLLM's metrics are told of our counts, which may become less."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from swdriver_shim.adapters.vllm.engine_driver import EngineDriver
from swdriver_shim.adapters.vllm.stats import EACH_SECONDS, StatsSource, added


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
        self.shim = SimpleNamespace(has_driver=True, driver=SimpleNamespace(statistics=statistics))


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


def test_increments_are_added_by_kind() -> None:
    one = {"tokens": {"hit_dram": 1}, "bytes": {"loaded": 2}}
    other = {"tokens": {"hit_dram": 3, "hit_tier2": 4}, "columns": {"refused": 5}}
    assert added(one, other) == {
        "tokens": {"hit_dram": 4, "hit_tier2": 4},
        "bytes": {"loaded": 2},
        "columns": {"refused": 5},
    }
