"""Explanations at a terminal are in words."""

from __future__ import annotations

import io
from typing import Any, Final

from console.ctl.explanations import in_words
from console.ctl.output import Screen
from telemetry.metrics import words_of

RUN: Final[dict[str, Any]] = {
    "first": 0,
    "last": 19,
    "tokens": 1280,
    "state": "no_state",
    "tier2": False,
    "slots": [86, 333],
    "expires_in_seconds": [1794.2, 1794.2],
    "uses_max": 181,
    "priority": 35,
    "no_spill": "not_encrypted",
}


def described(answer: dict[str, Any]) -> dict[str, str]:
    stream = io.StringIO()
    Screen(stream).described(in_words(answer))
    pairs = (line.partition(":") for line in stream.getvalue().splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def test_columns_are_told_by_words_and_ranges() -> None:
    assert described(RUN) == {
        "First column": "0",
        "Last column": "19",
        "Tokens": "1280",
        "State": "no state",
        "In tier 2": "no",
        "Slots": "86 to 333",
        "Expires in": "29 min 54 s",
        "Uses at most": "181",
        "Priority": "35",
        "Not copied to tier 2": "not encrypted",
    }


def test_columns_that_never_expire_and_have_no_slots() -> None:
    told = described({**RUN, "slots": None, "expires_in_seconds": None})
    assert (told["Slots"], told["Expires in"]) == ("-", "never")


def test_headings_of_a_table_are_words_without_units() -> None:
    stream = io.StringIO()
    candidate = {"replica": "chat-0", "seconds": 0.0923, "waiting_seconds": 0.0, "tier2_tokens": 64}
    Screen(stream).described(in_words({"candidates": [candidate]}))
    _, headings, row = stream.getvalue().splitlines()
    assert headings.split("   ")[0].strip() == "REPLICA"
    assert " ".join(headings.split()) == "REPLICA FIRST TOKEN WAITING TIER 2 TOKENS"
    assert "92.3 ms" in row


def test_an_error_says_whether_it_was_early_or_late() -> None:
    told = {error: described({"error_seconds": error}) for error in (-0.0447, 1.5, None)}
    assert told == {
        -0.0447: {"Compared with expected": "44.7 ms earlier"},
        1.5: {"Compared with expected": "1.5 s later"},
        None: {"Compared with expected": "-"},
    }


def test_outcomes_have_the_words_of_the_pages() -> None:
    assert [words_of(one) for one in ("dram", "tier2", "never_stored")] == [
        "memory",
        "tier 2",
        "never stored",
    ]
    assert in_words({"columns": [{"outcome": "dram"}]}) == {"columns": [{"outcome": "memory"}]}
