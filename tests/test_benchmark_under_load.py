"""The benchmark under load: which requests count as before, during and after a move."""

from __future__ import annotations

from benchmarks.under_load import Answer, conversation, window_rows
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.replay.fleet import Move


def answer(due: float, ended: float, hit: int, seconds: float = 0.001) -> Answer:
    return Answer(due, ended, 100, hit, seconds, 0)


def test_a_request_that_a_move_was_a_part_of_is_during() -> None:
    answers = [
        answer(0, 9.9, 90, 0.002),
        answer(9, 10.5, 45),  # begins before
        answer(15, 16, 90),
        answer(19, 30, 90, 0.004),  # ends after
        answer(20.5, 21, 80),
    ]
    rows = {row.id: row for row in window_rows(answers, Move(1, began=10, ended=20))}
    assert [rows[f"move.requests.{name}"].value for name in ("before", "during", "after")] == [1, 3, 1]
    assert rows["move.hit_rate.before"].value == 90
    assert rows["move.hit_rate.during"].value == 75
    assert rows["move.hit_rate.during"].holds is False
    assert rows["move.load_p99.during"].value == 4
    assert rows["move.load_p99.during"].ratio == 0.5


def test_a_question_is_new_and_what_it_is_about_is_not() -> None:
    one, other = conversation(3, 1), conversation(3, 2)
    assert one[: -4 * COLUMN_TOKENS] == other[: -4 * COLUMN_TOKENS] == conversation(3)
    assert one[-4 * COLUMN_TOKENS :] != other[-4 * COLUMN_TOKENS :]
    assert not set(conversation(2)[:64:4]) & set(conversation(3)[:64:4])
