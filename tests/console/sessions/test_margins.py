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
        "columns": 5000,
        "incomplete": 0,
        "unreachable": frozenset(),
        "complete_up_to": ago(9000),
        "at": ago(5),
    }
    return Margin("job1.full.0", "home", what, found, 1 << 20, Report(**{**report, **said}))


def test_of_complete_columns_any_one_holder_may_be_taken_away() -> None:
    for code in ("1+1", "2+1", "4+2"):
        assert margin(code).is_complete
        assert margin(code).why_not_without("n1", NOW) == ""


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            {"since": {"n3": 60}, "incomplete": 1204},
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
            {"incomplete": 1},
            "1 column of job1.full.0 lacks a fragment" + SURVIVES,
        ),
        (
            {"holders": 2},
            "columns of job1.full.0 may lack a fragment" + SURVIVES,
        ),
        ({"at": ago(90)}, "home has not reported on the fragments of job1.full.0 lately."),
        ({"state": "indexing"}, "home can't tell yet about the fragments of job1.full.0: indexing."),
        ({"back": {"n2": 10}}, "n2 has just come back; home looks what job1.full.0 lacks."),
        (
            {"complete_up_to": None},
            "columns of job1.full.0 may lack a fragment, "
            "at n2 (not repaired yet), n3 (not repaired yet)" + SURVIVES,
        ),
    ],
)
def test_a_second_holder_is_not_taken_away_while_columns_may_lack_a_fragment(
    values: dict[str, Any], why: str
) -> None:
    assert margin(**values).why_not_without("n1", NOW) == why


def test_what_a_holder_itself_lacks_does_not_keep_it() -> None:
    assert margin(away={"n1": "draining"}, incomplete=7).why_not_without("n1", NOW) == ""
    assert margin(since={"n1": 60}, incomplete=7).why_not_without("n1", NOW) == ""
    assert margin(back={"n1": 1}).why_not_without("n1", NOW) == ""


def test_a_code_that_survives_two_losses_has_one_left_after_the_first() -> None:
    assert margin("4+2", away={"n2": "draining"}, incomplete=7).why_not_without("n1", NOW) == ""
    assert margin("4+2", since={"n2": 60}, incomplete=5000).why_not_without("n1", NOW) == ""
    assert margin("4+2", incomplete=7).why_not_without("n1", NOW) == ""
    two = margin("4+2", away={"n2": "draining"}, since={"n3": 60}, incomplete=7)
    assert "at n2 (draining), n3 (not repaired yet)" in two.why_not_without("n1", NOW)
    assert two.why_not_without("n2", NOW) == ""


@pytest.mark.parametrize(
    "values",
    [
        {"incomplete": 1},
        {"unreachable": frozenset({"n2"})},
        {"since": {"n2": 60}},
        {"state": "indexing"},
        {"complete_up_to": None},
        {"holders": 2},
    ],
)
def test_columns_are_complete_when_every_present_holder_has_its_fragments(
    values: dict[str, Any],
) -> None:
    assert not margin(**values).is_complete


def test_an_agent_that_has_never_stored_any_keeps_nobody() -> None:
    assert margin(state="refused", complete_up_to=None).is_unused
    assert not margin(state="refused").is_unused, "it did so once"
    assert not margin(complete_up_to=None).is_unused
