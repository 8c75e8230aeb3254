"""What two versions cost is compared by turns."""

import pytest

from benchmarks.versions import compared


def test_the_ratio_is_of_turns_that_followed_one_another() -> None:
    """The machine was twice as slow in the second turn, for both."""
    [row] = compared([{"match": 10.0}, {"match": 20.0}], [{"match": 9.0}, {"match": 18.0}])
    assert row.ratio == pytest.approx(0.9)
    assert not row.holds


def test_two_in_a_hundred_more_is_as_fast() -> None:
    [row] = compared([{"match": 102.0}], [{"match": 100.0}])
    assert row.holds


def test_what_the_other_version_does_not_have_is_compared_with_what_it_does_instead() -> None:
    same, own = compared([{"ingest": 10.0, "ingest.own": 12.0}], [{"ingest": 11.0}])
    assert same.ratio == pytest.approx(1.1)
    assert (own.id, own.against) == ("ingest.own", "11.00 µs of `ingest`")
    assert own.ratio == pytest.approx(11 / 12)
