"""Notes of the places that shards have left: none is lost, and none is struck off too early."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swdriver_shim.daemon.left_homes import HomeAddress, LeftHomes

HERE, THERE = HomeAddress("unix:/here", "0.1"), HomeAddress("unix:/there", "0.1")
AT = "full", 1


def test_shards_that_move_at_once_are_all_written_down(tmp_path: Path) -> None:
    shards, together = [("full", index) for index in range(8)], threading.Barrier(8)
    with ThreadPoolExecutor(len(shards)) as threads:
        for number in range(10):
            places = LeftHomes(tmp_path / f"{number}")

            def leave(at: tuple[str, int], places: LeftHomes = places) -> None:
                together.wait(60)
                places.add(at, HERE)

            list(threads.map(leave, shards))
            known = LeftHomes(tmp_path / f"{number}")
            assert [known.left_by(at) for at in shards] == [[HERE]] * len(shards)


def test_what_is_added_after_the_look_is_not_struck_off(tmp_path: Path) -> None:
    """Also where it is a place that was listed already: it is being left once more."""
    places = LeftHomes(tmp_path / "places")
    places.add(AT, HERE)
    seen = places.marks(AT)
    places.add(AT, THERE)
    places.add(AT, HERE)
    places.remove(AT, seen)
    assert places.left_by(AT) == LeftHomes(tmp_path / "places").left_by(AT) == [THERE, HERE]
    places.remove(AT, places.marks(AT))
    assert places.left_by(AT) == LeftHomes(tmp_path / "places").left_by(AT) == []


def test_what_cannot_be_written_down_is_said_and_may_be_tried_again(tmp_path: Path) -> None:
    places = LeftHomes(tmp_path / "places")
    (tmp_path / "places").mkdir()
    with pytest.raises(OSError, match="places"):
        places.add(AT, HERE)
    (tmp_path / "places").rmdir()
    places.add(AT, HERE)
    assert LeftHomes(tmp_path / "places").left_by(AT) == [HERE]


def test_what_cannot_be_crossed_out_stays_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = LeftHomes(tmp_path / "places")
    places.add(AT, HERE)
    (tmp_path / "places").unlink()
    (tmp_path / "places").mkdir()
    places.remove(AT, places.marks(AT))
    assert "can't be stored" in caplog.text
    assert places.left_by(AT) == [HERE]


def test_without_a_file_no_shard_has_ever_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert LeftHomes(tmp_path / "notes" / "places").left_by(AT) == []
    assert LeftHomes(None).left_by(AT) == []
    assert not caplog.records


@pytest.mark.parametrize("content", [b"", b"nonsense", b'[["full", 1, [["unix:/here"', b'{"full": 1}'])
def test_a_file_that_cannot_be_read_is_said_and_nothing_goes_on_without_it(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "places").write_bytes(content)
    with pytest.raises(OSError, match="The homes that shards of this driver have left can't be read"):
        LeftHomes(tmp_path / "places")
    assert (tmp_path / "places").read_bytes() == content


def test_a_file_that_is_none_is_said_as_well(tmp_path: Path) -> None:
    (tmp_path / "places").mkdir()
    with pytest.raises(OSError, match="can't be read"):
        LeftHomes(tmp_path / "places")
