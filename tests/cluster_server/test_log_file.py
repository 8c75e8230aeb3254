"""Logs are bounded, and who follows one reads each line once, over rotations."""

from __future__ import annotations

from pathlib import Path

from cluster_server.processes.core import Goal, Limits, Memory, Running, Seen, Step, next_for_instance
from cluster_server.processes.log_file import LogFile, last_line

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


def test_a_silent_manager_is_killed_after_its_time_and_not_before() -> None:
    seen = Seen(has_folder=True, process=Running.YES, told=Goal.RUN, last_seen=100.0)
    for now, step in ((159.0, Step.WAIT), (160.0, Step.KILL)):
        found = next_for_instance(Goal.RUN, 30.0, seen, Memory(), now, Limits(silent_seconds=60.0))
        assert found.step is step
    assert next_for_instance(Goal.RUN, 30.0, seen, Memory(), 120.0, Limits(60.0)).wake_at == 160.0
