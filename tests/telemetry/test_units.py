"""Sizes, durations and rates: one way to read them, one to write them, everywhere."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry import units
from telemetry.units import Unreadable, parse_duration, parse_seconds, parse_size

VECTOR = Path(__file__).with_name("units.json")


@pytest.mark.parametrize("case", json.loads(VECTOR.read_text()), ids=lambda case: str(case["text"]))
def test_python_writes_what_the_vector_says(case: dict[str, Any]) -> None:
    if case["unit"] == "age":
        assert units.age(case["value"]) == case["text"]
    else:
        assert units.shown(case["value"], case["unit"]) == case["text"]


def test_what_is_no_finite_number_is_written_all_the_same() -> None:
    assert [units.size(float("inf")), units.duration(float("nan"))] == ["inf", "nan"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096 bytes", 4096),
        ("512MiB", 512 << 20),
        (" 24 GiB ", 24 << 30),
        ("24Gi", 24 << 30),
        ("24G", 24 << 30),
        ("64m", 64 << 20),
        ("512GB", 512 * 10**9),
        ("512 gb", 512 * 10**9),
        ("1.5 TiB", 3 << 39),
        (".5k", 512),
        ("1.7GiB", 1_825_361_101),
        ("1EiB", 1 << 60),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "24X", "24 GiB 1", "-1", "1e9", "0.5", "1" * 40, "1.5.5G", "٣GiB", "24 \u212aiB"]
)
def test_what_is_no_size_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(Unreadable, match=r"is not a size\. Write 512MiB or 64GiB .*, 64GB "):
        parse_size(text)


def test_sizes_have_bounds() -> None:
    assert parse_size("16MiB", low=16 << 20) == 16 << 20
    with pytest.raises(Unreadable, match=r"^'16MB' is not from 16 MiB to 1 EiB\.$"):
        parse_size("16MB", low=16 << 20)
    with pytest.raises(Unreadable, match="to 1 EiB"):
        parse_size("1025PiB")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("90s", 90),
        ("2m", 120),
        ("10 min", 600),
        ("1.5h", 5400),
        (" 7 D ", 604_800),
        ("1w", 604_800),
        ("1h30m", 5400),
        ("1 d 2 h 3 min 4 s", 93_784),
        ("PT15M", 900),
        ("P1DT2H", 93_600),
        ("P2W", 1_209_600),
        ("500ms", 0.5),
        ("250 µs", 0.00025),
        ("PT0.5S", 0.5),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "10 years",
        "-5",
        "1e9",
        "1" * 40,
        "٣ min",
        "P",
        "PT",
        "P1M",
        "30m1h",
        "1h30",
        "\u017f",
    ],
)
def test_what_is_no_duration_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(Unreadable, match=r"is not a duration\. Write 90s, 15m, 2h, 7d or 1h30m\."):
        parse_duration(text)


def test_durations_have_bounds_and_may_have_to_be_whole() -> None:
    with pytest.raises(Unreadable, match=r"^'2h' is not from 5 s to 1 h\.$"):
        parse_seconds("2h", low=5, high=3600)
    with pytest.raises(Unreadable, match="not a whole number of seconds"):
        parse_seconds("1.5")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (units.counted(1, "box"), "1 box"),
        (units.counted(2, "box"), "2 boxes"),
        (units.counted(0, "process", zero="no"), "no processes"),
        (units.counted(0, "column"), "0 columns"),
        (units.counted(1204.0, "column"), "1,204 columns"),
        (units.counted(1.3, "column"), "1 column"),
        (units.counted(0.4, "column", zero="no"), "no columns"),
        (units.counted(1, "box is", "boxes are"), "1 box is"),
        (units.counted(3, "box is", "boxes are"), "3 boxes are"),
    ],
)
def test_what_is_counted_is_said_in_words(said: str, text: str) -> None:
    assert said == text


@given(st.integers(0, units.BYTES_MAX))
def test_an_exact_text_is_read_back_as_the_same_number(amount: int) -> None:
    assert parse_size(units.exact_size(amount)) == amount
    assert parse_seconds(units.exact_duration(amount)) == amount


@given(one=st.integers(1, 40_000_000), other=st.integers(1, 40_000_000))
def test_two_exact_texts_are_alike_only_for_one_number(one: int, other: int) -> None:
    assert (units.exact_duration(one) == units.exact_duration(other)) == (one == other)
    assert (units.exact_size(one) == units.exact_size(other)) == (one == other)


@given(st.integers(1, units.BYTES_MAX))
def test_a_text_for_reading_is_off_by_half_a_percent_at_most(amount: int) -> None:
    assert parse_size(units.size(amount), high=2 * units.BYTES_MAX) == pytest.approx(
        amount, rel=0.0051, abs=1
    )


@given(st.floats(1e-5, 1e9))
def test_a_duration_for_reading_is_off_by_two_percent_at_most(seconds: float) -> None:
    assert parse_duration(units.duration(seconds)) == pytest.approx(seconds, rel=0.0213)


@given(st.floats(0, 1e18))
def test_no_text_has_more_digits_than_say_something(amount: float) -> None:
    for unit in ("bytes", "bytes/s", "/s", ""):
        digits = units.shown(amount, unit).split()[0]
        assert len(digits.replace(".", "").lstrip("0")) <= (4 if float(digits) >= 1000 else 3)


@given(st.text(max_size=50))
def test_whatever_is_given_is_read_or_refused(text: str) -> None:
    for read in (parse_size, parse_duration, parse_seconds):
        with contextlib.suppress(Unreadable):
            assert read(text) >= 0
