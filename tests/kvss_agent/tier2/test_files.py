"""System calls for whole files, in Python and in compiled code: the same bytes and the same answers."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvss_agent.mover import PYTHON
from kvss_agent.tier2.files import PYTHON_FILES, Files, discard, files

NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
DATA = memoryview(random.Random(3).randbytes(100_000))


@pytest.fixture(params=["python", "native"])
def calls(request: pytest.FixtureRequest) -> Files:
    if request.param == "python":
        return PYTHON_FILES
    return files(request.getfixturevalue("compiled"))


@pytest.fixture(params=["bounced", "straight"])
def bounce(request: pytest.FixtureRequest) -> memoryview | None:
    """Smaller than most files here, and with another file's bytes in it."""
    return memoryview(bytearray(b"\xdd" * 8192)) if request.param == "bounced" else None


def put(calls: Files, path: Path, *parts: memoryview, bounce: memoryview | None = None) -> object:
    unfinished = f"{path}.unfinished"
    (fd,) = calls.stage([(unfinished, parts)], NEW, True, bounce)
    if isinstance(fd, OSError):
        return fd
    (error,) = calls.publish([(fd, unfinished, str(path))])
    return error


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def number_of(answer: object) -> int | None:
    return answer.errno if isinstance(answer, OSError) else None


def test_who_has_compiled_code_uses_it(compiled: Any) -> None:
    assert files(PYTHON) is PYTHON_FILES
    assert files(compiled) == (compiled.stage_files, compiled.publish_files, compiled.fetch_files)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(0, 40_000), max_size=6),
    wanted=st.lists(st.integers(0, 45_000), min_size=1, max_size=6),
    bounced=st.booleans(),
)
def test_a_file_is_its_parts_and_comes_back_into_any_others(
    compiled: Any,
    tmp_path: Path,
    cuts: list[int],
    wanted: list[int],
    bounced: bool,  # noqa: FBT001 - Hypothesis passes it by name
) -> None:
    cuts = sorted(cuts)
    parts = [DATA[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    size = cuts[-1] if cuts else 0
    answers = []
    for calls in (PYTHON_FILES, files(compiled)):
        path = tmp_path / "file"
        bounce = memoryview(bytearray(4096)) if bounced else None
        assert put(calls, path, *parts, bounce=bounce) is None
        assert path.read_bytes() == DATA[:size]
        into = [memoryview(bytearray(length)) for length in wanted]
        answers.append((calls.fetch([(str(path), into)], READ, bounce), [bytes(one) for one in into]))
        received = b"".join(answers[-1][1])
        assert received[:size] == DATA[: min(size, len(received))]
        assert not any(received[size:])
        path.unlink()
    assert answers[0] == answers[1]
    assert answers[0][0] == [min(size, sum(wanted))]


def test_each_file_has_an_answer_of_its_own(
    calls: Files, tmp_path: Path, bounce: memoryview | None
) -> None:
    paths = [str(tmp_path / name) for name in ("one", "no/such/folder", "two")]
    parts = [DATA[:10_000], DATA[10_000:20_000]]
    one, missing, two = calls.stage([(path, parts) for path in paths], NEW, False, bounce)
    assert isinstance(missing, FileNotFoundError)
    assert missing.filename == paths[1]
    assert str(missing).startswith(f"[Errno {errno.ENOENT}] {os.strerror(errno.ENOENT)}")
    assert isinstance(one, int)
    assert isinstance(two, int)
    (tmp_path / "folder").mkdir()
    staged = [(one, paths[0], str(tmp_path / "folder")), (two, paths[2], str(tmp_path / "final"))]
    refused, done = calls.publish(staged)
    assert isinstance(refused, IsADirectoryError)
    assert done is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "folder"]
    into = memoryview(bytearray(30_000))
    fetched = calls.fetch(
        [(paths[0], [into]), (str(tmp_path / "final"), [into]), (str(tmp_path), [into])], READ, bounce
    )
    assert [number_of(one) for one in fetched] == [errno.ENOENT, None, errno.EISDIR]
    assert fetched[1] == 20_000
    assert into[:20_000] == DATA[:20_000]


def test_a_name_is_taken_over_whole(calls: Files, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"what was there before, and is longer")
    assert put(calls, path, DATA[:7]) is None
    assert path.read_bytes() == DATA[:7]
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_finished_is_not_left_there(calls: Files, tmp_path: Path) -> None:
    """/dev/full has no space; and who has the lock already does not wait for it."""
    before = descriptors()
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    (answer,) = calls.stage([(str(link), [DATA[:100]])], os.O_WRONLY, False, None)
    assert number_of(answer) == errno.ENOSPC
    assert [*tmp_path.iterdir()] == []
    taken = tmp_path / "taken"
    with taken.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (answer,) = calls.stage([(str(taken), [DATA[:100]])], os.O_WRONLY, True, None)
    assert number_of(answer) == errno.EWOULDBLOCK
    assert [*tmp_path.iterdir()] == []
    assert descriptors() == before


def test_a_file_that_was_swept_before_it_was_locked_is_not_written(calls: Files, tmp_path: Path) -> None:
    with (tmp_path / "gone").open("wb") as file:
        Path(file.name).unlink()
        path = f"/proc/self/fd/{file.fileno()}"
        for locked, expected in ((True, errno.ENOENT), (False, None)):
            (answer,) = calls.stage([(path, [DATA[:100]])], os.O_WRONLY, locked, None)
            if expected is None:
                assert isinstance(answer, int), "without locks nobody sweeps what is young"
                os.close(answer)
            else:
                assert number_of(answer) == expected


def test_a_staged_file_is_locked_until_it_is_published_or_discarded(
    calls: Files, tmp_path: Path
) -> None:
    before = descriptors()
    for publishes in (True, False):
        path = tmp_path / "unfinished"
        (fd,) = calls.stage([(str(path), [DATA[:100]])], NEW, True, None)
        assert isinstance(fd, int)
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if publishes:
            assert calls.publish([(fd, str(path), str(tmp_path / "final"))]) == [None]
        else:
            discard(fd, str(path))
        assert not path.exists()
    assert descriptors() == before


def test_nothing_is_held_after_a_call(compiled: Any, tmp_path: Path) -> None:
    part, bounce = bytearray(5000), bytearray(4096)
    path = tmp_path / "file"
    put(files(compiled), path, memoryview(part), bounce=memoryview(bounce))
    compiled.fetch_files([(str(path), (part,))], READ, bounce)
    for wrong in ([(str(path), (part, bytes(3)))], [(str(path), (part,)), 7], [(7, (part,))]):
        with pytest.raises((TypeError, BufferError)):
            compiled.fetch_files(wrong, READ, bounce)
    with pytest.raises(ValueError, match="up to 8 parts"):
        compiled.stage_files([(str(path), (part,) * 9)], NEW, False, bounce)
    with pytest.raises(ValueError, match="no bytes"):
        compiled.stage_files([(str(path), (part,))], NEW, False, bytearray())
    with pytest.raises(ValueError, match="null"):
        compiled.stage_files([("a\0b", (part,))], NEW, False, bounce)
    with pytest.raises(TypeError):
        compiled.publish_files([7])
    part.clear()  # Python refuses that while somebody has the buffer
    bounce.clear()


def test_others_run_while_files_are_written_and_read(compiled: Any, tmp_path: Path) -> None:
    """Nobody takes the interpreter away in this test, so who finds it busy was let in."""
    calls, memory = files(compiled), memoryview(mmap.mmap(-1, 8 << 20))
    busy = seen = False

    def keep_busy() -> None:
        nonlocal busy
        until = time.monotonic() + 10
        while not seen and time.monotonic() < until:
            busy = True
            put(calls, tmp_path / "file", memory)
            calls.fetch([(str(tmp_path / "file"), [memory])], READ, None)
            busy = False

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread = threading.Thread(target=keep_busy)
        thread.start()
        while thread.is_alive():
            seen = seen or busy
            time.sleep(0.0001)
    finally:
        sys.setswitchinterval(before)
    assert seen
