"""Where an operation goes, whatever its steps say in whatever order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from console.operations import core
from console.operations.core import Done, Failed, Outcome, Position, Shape, State, Waiting

BEGIN = datetime(2026, 11, 21, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
OUTCOMES: st.SearchStrategy[Outcome] = st.one_of(
    st.just(Done()), st.just(Waiting("w", 0.5)), st.just(Failed("r", "d"))
)
MOVES = st.lists(st.one_of(OUTCOMES, st.sampled_from(["cancel", "again", "later"])), max_size=40)
SHAPES = st.builds(
    lambda total, final: Shape((MINUTE,) * total, final if final < total else None),
    st.integers(1, 5),
    st.integers(0, 8),
)


@given(SHAPES, MOVES)
@settings(max_examples=200)
def test_it_reaches_its_goal_or_where_it_was_or_asks_for_a_person(
    shape: Shape, moves: list[Outcome | str]
) -> None:
    """Model: the steps that may have had an effect. None is left after going back."""
    position, now = Position(State.RUNNING, 0, BEGIN), BEGIN
    begun: set[int] = set()
    for move in moves:
        if move == "cancel":
            position = core.cancelled(position, shape, now)
        elif move == "again":
            position = core.again(position, now)
        elif move == "later":
            now += 2 * MINUTE
        elif position.state.moves and not isinstance(move, str):
            was, step = position.state, position.step
            begun.add(step) if was is State.RUNNING else None
            position = core.after(position, move, shape, now)
            if was is State.UNDOING and isinstance(move, Done):
                begun.discard(step)
        assert 0 <= position.step <= shape.total
        assert 0 <= position.percent(shape) <= 100
        if position.state is State.SUCCEEDED:
            assert begun == set(range(shape.total))
        if position.state in (State.FAILED, State.CANCELLED):
            assert begun == set()
            assert position.error
            assert position.message == position.error.detail
        if shape.first_final is not None and begun & set(range(shape.first_final, shape.total)):
            assert position.state not in (State.UNDOING, State.FAILED, State.CANCELLED)


def test_what_waits_too_long_goes_back_and_says_what_it_waited_for() -> None:
    shape = Shape((MINUTE, MINUTE))
    waiting = core.after(Position(State.RUNNING, 0, BEGIN), Waiting("for ax1"), shape, BEGIN + MINUTE)
    assert waiting.state is State.RUNNING
    late = core.after(waiting, Waiting("for ax1"), shape, BEGIN + 2 * MINUTE)
    assert late.state is State.UNDOING
    assert late.error == Failed("TookTooLong", "It took too long. for ax1")


def test_percent_rises_forward_and_sinks_on_the_way_back() -> None:
    shape = Shape((MINUTE,) * 4)
    position = Position(State.RUNNING, 0, BEGIN)
    seen = [position.percent(shape)]
    for outcome in (Done(), Waiting("w", 0.5), Done(), Failed("r", "d"), Done(), Done(), Done()):
        position = core.after(position, outcome, shape, BEGIN)
        seen.append(position.percent(shape))
    assert seen == [0, 25, 37, 50, 75, 50, 25, 0]
    assert position.state is State.FAILED
