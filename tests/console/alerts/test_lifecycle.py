"""Which state follows from which: with delays, never green for nothing known. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.alerts.state.lifecycle import OPEN, Delays, Lifecycle, State, Verdict, advance
from console.alerts.state.matchers import BadMatcher, match, parse, split

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
PATIENCE = Delays(pending=2 * MINUTE, keep_firing=MINUTE)
B, F, N, G = Verdict.BREACH, Verdict.OK, Verdict.NO_DATA, Verdict.GONE


def lived(verdicts: list[Verdict], delays: Delays = PATIENCE) -> list[State | None]:
    """The state after each verdict; they come every minute."""
    states: list[State | None] = []
    life: Lifecycle | None = None
    for minute, verdict in enumerate(verdicts):
        at = NOON + minute * MINUTE
        if life or verdict is B:
            life = advance(life or Lifecycle(State.QUIET, at), verdict, delays, at)
        states.append(life.state if life else None)
    return states


@pytest.mark.parametrize(
    ("verdicts", "states"),
    [
        ([B, B, B], ["pending", "pending", "firing"]),
        ([B, F], ["pending", "quiet"]),
        ([B, B, B, F, F], ["pending", "pending", "firing", "firing", "resolved"]),
        ([B, B, B, F, B, F, F], [*["pending"] * 2, *["firing"] * 4, "resolved"]),
        ([B, B, B, N, N], ["pending", "pending", "firing", "no_data", "no_data"]),
        ([B, N, F], ["pending", "no_data", "quiet"]),
        ([B, B, B, N, B], ["pending", "pending", "firing", "no_data", "firing"]),
        ([B, B, B, N, F, F], [*["pending"] * 2, "firing", "no_data", "firing", "resolved"]),
        ([B, B, B, F, F, B], [*["pending"] * 2, *["firing"] * 2, "resolved", "pending"]),
        ([F, N], [None, None]),
        ([B, G], ["pending", "quiet"]),
        ([B, B, B, G, G], [*["pending"] * 2, "firing", "resolved", "resolved"]),
        ([B, B, B, N, G], [*["pending"] * 2, "firing", "no_data", "resolved"]),
        ([F, G], [None, None]),
    ],
)
def test_states_follow(verdicts: list[Verdict], states: list[str | None]) -> None:
    assert lived(verdicts) == states


def test_without_patience_a_breach_fires_at_once_and_ends_at_once() -> None:
    hasty = Delays(timedelta(0), timedelta(0))
    assert lived([B, F, B], hasty) == ["firing", "resolved", "firing"]


@given(st.lists(st.sampled_from(Verdict), max_size=30), st.integers(0, 3), st.integers(0, 3))
def test_what_is_unknown_never_ends_an_alert_and_an_end_takes_its_time_unless_nothing_is_left(
    verdicts: list[Verdict], breach: int, fine: int
) -> None:
    states = lived(verdicts, Delays(breach * MINUTE, fine * MINUTE))
    for minute, (verdict, state) in enumerate(zip(verdicts, states, strict=True)):
        before = states[minute - 1] if minute else None
        if before in OPEN:
            assert (state in OPEN) or verdict in (F, G)
            assert verdict is not N or state == State.NO_DATA
        if state == State.RESOLVED and before != state and verdict is not G:
            assert verdicts[max(0, minute - fine) : minute + 1] == [F] * (fine + 1)
        if state == State.FIRING and before in (None, State.QUIET, State.RESOLVED, State.PENDING):
            assert verdict is B
            assert breach == 0 or before == State.PENDING


@pytest.mark.parametrize(
    ("matchers", "holds"),
    [
        ("node=ax-7", True),
        ("node=ax-*, rule=queue-deep", True),
        ("node=ax-8", False),
        ("node!=ax-8, severity!=notice", True),
        ("org=acme", False),
        ("org!=acme", True),
        ("", True),
    ],
)
def test_matchers_hold_all_together(matchers: str, *, holds: bool) -> None:
    labels = {"node": "ax-7", "rule": "queue-deep", "severity": "page"}
    assert match(parse(split(matchers)), labels) is holds


@pytest.mark.parametrize(
    "text", ["node", "=x", "node=", "node=[a]", "no de=x", "node=a?b", "x=" + "y" * 200]
)
def test_what_is_no_matcher_is_told(text: str) -> None:
    with pytest.raises(BadMatcher, match=r"Write label=value"):
        parse([text])
    with pytest.raises(BadMatcher, match="At most 8"):
        parse(["node=x"] * 9)


@given(st.lists(st.from_regex(r"[a-z]{1,5}!?=[a-z*-]{1,9}", fullmatch=True), max_size=8))
def test_matchers_are_written_as_they_are_read(texts: list[str]) -> None:
    assert [str(one) for one in parse(texts)] == texts
