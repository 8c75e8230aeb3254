"""What a battle prints at its end, and what decides its exit code."""

from __future__ import annotations

import math

from tests.hostile.battle import Result
from tests.hostile.figures import Figure, Over, combined, table


def test_a_figure_over_its_limit_breaks_a_promise_and_one_without_a_limit_none() -> None:
    result = Result()
    result.measured("reconcile lag", 10.0, "s", 10.0)
    result.measured("others.p50", 99.0, "ms")
    assert result.broken == []
    result.measured("alert lag", 31.0, "s", 30.0)
    assert result.broken == ["alert lag is 31 s, and may be 30 s."]


def test_what_was_not_measured_does_not_hold() -> None:
    assert not Figure("reconcile lag", math.nan, "s", 10.0).holds
    assert not combined([[Figure("lag", 1, "s", 10)], [Figure("lag", math.nan, "s", 10)]])[0].holds


def test_rounds_become_one_figure_of_each_name() -> None:
    def a_round(lost: float, p99: float, lag: float) -> list[Figure]:
        return [
            Figure("lost", lost, "tokens", 0, Over.SUM),
            Figure("p99", p99, "ms", None, Over.MEDIAN),
            Figure("lag", lag, "s", 10),
        ]

    found = combined([a_round(0, 9, 1), a_round(256, 300, 2), a_round(128, 10, 3)])
    assert {one.name: one.value for one in found} == {"lost": 384, "p99": 10, "lag": 3}


def test_the_table_has_a_unit_a_limit_and_a_verdict() -> None:
    lines = table([Figure("lost", 256, "tokens", 0), Figure("p50", 1.5, "ms")]).splitlines()
    assert [line.split() for line in lines] == [
        ["figure", "value", "limit", "holds"],
        ["lost", "256", "tokens", "≤", "0", "tokens", "NO"],
        ["p50", "1.5", "ms"],
    ]
