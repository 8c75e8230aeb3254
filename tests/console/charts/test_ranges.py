"""Ranges as they stand in an address."""

from __future__ import annotations

import hypothesis.strategies as some
import pytest
from hypothesis import given

from console.charts.ranges import SECONDS_MAX, SECONDS_MIN, SPANS, BadRange, Range, of_query

NOW = 1_790_000_000.0


def test_without_anything_it_is_the_last_hour() -> None:
    assert of_query({}, NOW) == Range(NOW - 3600, NOW, "1h")
    assert of_query({}, NOW).is_live


@pytest.mark.parametrize("name", SPANS)
def test_a_span_ends_now(name: str) -> None:
    assert of_query({"range": name}, NOW) == Range(NOW - SPANS[name], NOW, name)


def test_a_fixed_range_is_in_utc_unless_it_says_otherwise_and_is_not_live() -> None:
    ours = of_query({"from": "2026-11-21T03:00", "until": "2026-11-21T04:00"}, NOW)
    same = of_query({"from": "2026-11-21T04:00:00+01:00", "until": "2026-11-21T04:00:00Z"}, NOW)
    assert ours == same
    assert not ours.is_live
    assert of_query({"until": "2026-11-21T04:00"}, NOW) == ours


@pytest.mark.parametrize(
    "query",
    [
        {"range": "2h"},
        {"from": "yesterday"},
        {"from": "2026-11-21T03:00", "until": "2026-11-21T02:00"},
        {"from": "2026-11-21T03:00", "until": "2026-11-21T03:00:30"},
        {"from": "0001-01-01T00:00:00+23:59", "until": "2026-11-21T03:00"},
        {"from": "1999-01-01", "until": "2026-11-21"},
    ],
    ids=str,
)
def test_nonsense_is_refused_with_a_sentence(query: dict[str, str]) -> None:
    with pytest.raises(BadRange, match=r"\.$"):
        of_query(query, NOW)


def test_what_ends_now_becomes_the_next_longer_span_and_goes_on_ending_now() -> None:
    assert of_query({}, NOW).wider == Range(NOW - SPANS["6h"], NOW, "6h")
    assert of_query({"range": "30d"}, NOW).wider == Range(NOW - 2 * SPANS["30d"], NOW)


MOMENTS = some.datetimes().map(str)


@given(some.dictionaries(some.sampled_from(["range", "from", "until"]), some.text() | MOMENTS))
def test_whatever_stands_there_is_a_range_of_bounded_length_or_refused(query: dict[str, str]) -> None:
    try:
        found = of_query(query, NOW)
    except BadRange:
        return
    assert SECONDS_MIN <= found.end - found.start <= SECONDS_MAX
    again = of_query(dict(part.split("=", 1) for part in found.query.split("&")), NOW)
    assert abs(again.start - found.start) < 1
    assert abs(again.end - found.end) < 1
