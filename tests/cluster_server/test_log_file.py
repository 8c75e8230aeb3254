"""Logs are bounded, and who follows one reads each line once, over rotations."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster_server.processes.core import Goal, Limits, Memory, Running, Seen, Step, next_for_instance
from cluster_server.processes.log_file import LogFile, last_line
from cluster_server.processes.worker import rotate

BYTES_MAX = 1000


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_it_is_bounded_and_the_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path, BYTES_MAX)
    for number in range(500):
        append(path, f"line {number:04}\n")
        log.rotate()
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= BYTES_MAX + 10
    place = log.place_of_tail(60)  # some are in the former file
    lines = []
    while piece := log.read(place)[0]:
        lines += piece.decode().splitlines()
        place += len(piece)
    assert lines == [f"line {number:04}" for number in range(440, 500)]
    assert last_line(path) == "line 0499"


def test_a_reader_goes_on_where_it_was_when_the_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log, place, read = LogFile(path, BYTES_MAX), 0, b""
    for number in range(300):
        append(path, f"line {number:04}\n")
        log.rotate()
        if number % 7 == 0:
            while (found := log.read(place))[0]:
                read, place = read + found[0], found[1]
    assert read.decode().splitlines() == [f"line {number:04}" for number in range(295)]


def test_a_reader_that_is_too_slow_goes_on_with_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path, BYTES_MAX)
    append(path, "x" * 5 * BYTES_MAX + "\n")
    log.rotate()
    append(path, "the end\n")
    piece, place = log.read(0)
    assert len(piece) == BYTES_MAX // 2
    assert log.read(place)[0] == b"the end\n"
    assert log.place_of_tail(1) == place


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_plain_file_is_neither_read_nor_waited_for_nor_written(
    tmp_path: Path, kind: str
) -> None:
    """Its processes can put something else in its place: who opens a pipe waits for ever, and with all
    threads of a server that wait nothing works any more."""
    secret = tmp_path / "secret"
    secret.write_text("of another\n" * BYTES_MAX)
    for name in ("log", "log.1"):
        place = tmp_path / kind / name
        place.parent.mkdir(exist_ok=True)
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "link":
            place.symlink_to(secret)
        else:
            place.mkdir()
    log = LogFile(tmp_path / kind / "log", BYTES_MAX)
    assert log.place_of_tail(10) == 0
    assert log.read(0)[0] == b""
    assert last_line(tmp_path / kind / "log") == ""
    log.rotate()
    (tmp_path / kind / "log").rename(tmp_path / "before")
    append(tmp_path / kind / "log", "x" * 5 * BYTES_MAX)
    with pytest.raises(OSError, match=r"log\.1"):
        log.rotate()
    assert secret.read_text() == "of another\n" * BYTES_MAX


def test_a_log_that_can_not_be_rotated_leaves_others_their_bounds(tmp_path: Path) -> None:
    workers = []
    for name in ("bad", "good"):
        (tmp_path / name).mkdir()
        append(tmp_path / name / "log", "x" * 5 * BYTES_MAX)
        log = LogFile(tmp_path / name / "log", BYTES_MAX)
        workers.append(SimpleNamespace(name=name, log=log))
    (tmp_path / "bad" / "log.1").mkdir()
    for worker in workers:
        rotate(worker)  # type: ignore[arg-type]
    assert (tmp_path / "good" / "log").stat().st_size == 0


def test_a_silent_manager_is_killed_after_its_time_and_not_before() -> None:
    seen = Seen(has_folder=True, process=Running.YES, told=Goal.RUN, last_seen=100.0)
    for now, step in ((159.0, Step.WAIT), (160.0, Step.KILL)):
        found = next_for_instance(Goal.RUN, 30.0, seen, Memory(), now, Limits(silent_seconds=60.0))
        assert found.step is step
    assert next_for_instance(Goal.RUN, 30.0, seen, Memory(), 120.0, Limits(60.0)).wake_at == 160.0
