"""Whether one more agent may be taken away. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from console.placement.rules import Redundancy
from console.sessions.plans.margins import Holding, Margin, Report

SURVIVES = ", and 2+1 survives the loss of 1 agent."
NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def margin(
    code: str = "2+1",
    *,
    away: Mapping[str, str] | None = None,
    since: Mapping[str, float] | None = None,
    back: Mapping[str, float] | None = None,
    holders: int | None = None,
    **said: Any,
) -> Margin:
    """All is well, but for what is said. `since`, `back`: seconds ago, by holder."""
    what = Redundancy(code)
    names = [f"n{number}" for number in range(1, (holders or what.holders) + 1)]
    found = [
        Holding(
            name,
            ago((since or {}).get(name, 9000)),
            ago((back or {}).get(name, 9000)),
            (away or {}).get(name, ""),
        )
        for name in names
    ]
    report = {
        "state": "ready",
        "reason": "",
        "incomplete": sum(said.get("incomplete_at", {}).values()),
        "incomplete_at": {},
        "most_lacking": 1,
        "unreachable": frozenset(),
        "holders_since": max(one.since for one in found),
        "has_stored": True,
        "at": ago(5),
    }
    return Margin("job1.full.0", "home", what, found, 1 << 20, Report(**{**report, **said}))


def test_of_complete_columns_any_one_holder_may_be_taken_away() -> None:
    for code in ("1+1", "2+1", "4+2"):
        assert margin(code).is_complete(ago(9999), NOW)
        assert margin(code).why_not_without("n1", NOW) == ""


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            {"incomplete_at": {"n3": 1204}},
            "1,204 columns of job1.full.0 lack a fragment, at n3 (not repaired yet)" + SURVIVES,
        ),
        (
            {"away": {"n2": "maintenance"}},
            "columns of job1.full.0 may lack a fragment, at n2 (maintenance)" + SURVIVES,
        ),
        (
            {"unreachable": frozenset({"n2"})},
            "columns of job1.full.0 may lack a fragment, at n2 (unreachable)" + SURVIVES,
        ),
        (
            {"incomplete_at": {"n1": 0, "n2": 1}},
            "1 column of job1.full.0 lacks a fragment, at n2 (not repaired yet)" + SURVIVES,
        ),
        (
            {"holders": 2},
            "columns of job1.full.0 may lack a fragment" + SURVIVES,
        ),
        ({"at": ago(90)}, "home has not reported on the fragments of job1.full.0 lately."),
        ({"state": "indexing"}, "home can't tell yet about the fragments of job1.full.0: indexing."),
        ({"back": {"n2": 10}}, "n2 changed a moment ago; home looks what job1.full.0 lacks."),
        (
            {"since": {"n2": 60, "n3": 70}, "holders_since": ago(80)},
            "columns of job1.full.0 may lack a fragment, "
            "at n2 (not repaired yet), n3 (not repaired yet)" + SURVIVES,
        ),
        (
            {"holders_since": None},
            (
                "home can't tell yet about the fragments of job1.full.0: it applies a new document, or "
                "its agent is of an earlier version."
            ),
        ),
    ],
)
def test_a_second_holder_is_not_taken_away_while_columns_may_lack_a_fragment(
    values: dict[str, Any], why: str
) -> None:
    assert margin(**values).why_not_without("n1", NOW) == why


def test_what_a_holder_itself_lacks_does_not_keep_it() -> None:
    seven = {"n1": 7}
    assert margin(away={"n1": "draining"}, incomplete_at=seven).why_not_without("n1", NOW) == ""
    assert margin(incomplete_at=seven, most_lacking=1).why_not_without("n1", NOW) == ""
    assert margin(back={"n1": 1}).why_not_without("n1", NOW) == ""


def test_a_code_that_survives_two_losses_has_one_left_after_the_first() -> None:
    assert margin("4+2", away={"n2": "draining"}).why_not_without("n1", NOW) == ""
    assert margin("4+2", incomplete_at={"n2": 5000}).why_not_without("n1", NOW) == ""
    assert margin("4+2", incomplete_at={"n2": 5, "n3": 5}).why_not_without("n1", NOW) == ""
    two = margin("4+2", away={"n2": "draining"}, incomplete_at={"n3": 7})
    assert "at n2 (draining), n3 (not repaired yet)" in two.why_not_without("n1", NOW)
    assert two.why_not_without("n3", NOW) == ""


def test_columns_that_lack_two_fragments_can_t_lose_a_third() -> None:
    """As after two holders came back with empty disks."""
    empty = margin("4+2", incomplete_at={"n2": 5000, "n3": 5000}, most_lacking=2)
    assert "at n2 (not repaired yet), n3 (not repaired yet)" in empty.why_not_without("n1", NOW)


@pytest.mark.parametrize(
    "values",
    [
        {"incomplete_at": {"n2": 1}},
        {"unreachable": frozenset({"n2"})},
        {"holders_since": ago(70)},
        {"holders_since": None},
        {"state": "indexing"},
        {"at": ago(90)},
        {"holders": 2},
    ],
)
def test_columns_are_complete_when_those_who_came_have_their_fragments(values: dict[str, Any]) -> None:
    since = {"n2": 60}
    assert margin(since=since).is_complete(ago(100), NOW)
    assert not margin(since=since, **values).is_complete(ago(100), NOW)


def test_what_others_lack_now_and_then_is_not_waited_for() -> None:
    assert margin(since={"n2": 60}, incomplete_at={"n1": 3, "n3": 2}).is_complete(ago(100), NOW)


def test_an_agent_that_has_never_stored_any_keeps_nobody() -> None:
    assert margin(state="refused", has_stored=False).is_unused
    assert not margin(state="refused").is_unused, "it did so once"
    assert not margin(has_stored=False).is_unused
