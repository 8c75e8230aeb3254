"""Documents that are kept: whole or not at all, however many write them at once."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvss_agent.process.durable_file import ABANDONED_SECONDS, remove_drafts, write_durably

THREADS = 8
ROUNDS = 20


def test_of_many_who_write_one_document_at_once_each_writes_all_of_it(tmp_path: Path) -> None:
    document, together = tmp_path / "notes", threading.Barrier(THREADS)
    contents = [bytes([number]) * 1000 * (number + 1) for number in range(THREADS)]

    def write(content: bytes) -> None:
        together.wait(60)
        write_durably(document, content)

    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(ROUNDS):
            list(threads.map(write, contents))
            assert document.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [document]
    assert stat.S_IMODE(document.stat().st_mode) == 0o600


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(OSError, match="notes"):
        write_durably(tmp_path / "notes", b"x")
    assert [one.name for one in tmp_path.iterdir()] == ["notes"]


def test_what_somebody_has_left_who_was_killed_while_writing_goes_with_the_next(tmp_path: Path) -> None:
    """It may have a secret in it that the document has no more."""
    document, long_ago = tmp_path / "notes", 2 * ABANDONED_SECONDS
    of_the_dead, of_another = tmp_path / ".notes.0123.new", tmp_path / ".notes.4567.new"
    of_the_dead.write_bytes(b"half of a secr")
    of_another.write_bytes(b"being written just n")
    other = tmp_path / ".others.0123.new"
    other.write_bytes(b"another document's")
    for one in (of_the_dead, other):
        os.utime(one, (one.stat().st_mtime - long_ago,) * 2)
    write_durably(document, b"new")
    assert sorted(tmp_path.iterdir()) == sorted([document, of_another, other])


def test_drafts_go_from_a_folder_that_is_ones_own(tmp_path: Path) -> None:
    for name in ("notes", ".notes.0123.new", ".others.4567.new", ".hidden", "of.new"):
        (tmp_path / name).write_bytes(b"x")
    remove_drafts(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".hidden", "notes", "of.new"]


def test_without_replacing_the_first_one_stays(tmp_path: Path) -> None:
    write_durably(tmp_path / "key", b"first", replace=False)
    write_durably(tmp_path / "key", b"second", replace=False)
    assert (tmp_path / "key").read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["key"]
