"""System calls for whole files, in Python and in compiled code: the same bytes and the same answers."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvss_agent.mover import PYTHON
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss
from kvss_agent.tier2.column_file import CLEAR
from kvss_agent.tier2.files import PYTHON_FILES, Files, Leaving, discard, files
from tests.kvss_agent.tier2.columns import BOLT, PAGE, address_of, evicted, new_slot, payload_of

NAMED = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
NAMELESS = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
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


@pytest.fixture(params=["named", "nameless"])
def new(request: pytest.FixtureRequest, tmp_path: Path) -> int:
    """How files are made."""
    if request.param == "named":
        return NAMED
    try:
        os.close(os.open(tmp_path, NAMELESS))
    except OSError as error:
        pytest.skip(f"each file has a name here: {error}")
    return NAMELESS


def put(
    calls: Files, path: Path, *parts: memoryview, new: int = NAMED, bounce: memoryview | None = None
) -> object:
    unfinished = f"{path}.unfinished"
    (fd,) = calls.stage([(unfinished, parts)], new, True, bounce)
    if isinstance(fd, OSError):
        return fd
    (error,) = calls.publish([(fd, unfinished, str(path))], new, True)
    return error


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def number_of(answer: object) -> int | None:
    return answer.errno if isinstance(answer, OSError) else None


def test_who_has_compiled_code_uses_it(compiled: Any) -> None:
    assert files(PYTHON) is PYTHON_FILES
    assert files(compiled) == (
        compiled.stage_files,
        compiled.publish_files,
        compiled.fetch_files,
        compiled.store_columns,
        compiled.load_columns,
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(0, 40_000), max_size=6),
    wanted=st.lists(st.integers(0, 45_000), min_size=1, max_size=6),
    bounced=st.booleans(),
)
def test_a_file_is_its_parts_and_comes_back_into_any_others(
    compiled: Any,
    tmp_path: Path,
    new: int,
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
        assert put(calls, path, *parts, new=new, bounce=bounce) is None
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
    calls: Files, tmp_path: Path, bounce: memoryview | None, new: int
) -> None:
    paths = [str(tmp_path / name) for name in ("one", "no/such/folder", "two")]
    parts = [DATA[:10_000], DATA[10_000:20_000]]
    one, missing, two = calls.stage([(path, parts) for path in paths], new, False, bounce)
    assert isinstance(missing, FileNotFoundError)
    assert missing.filename == paths[1]
    assert str(missing).startswith(f"[Errno {errno.ENOENT}] {os.strerror(errno.ENOENT)}")
    assert isinstance(one, int)
    assert isinstance(two, int)
    (tmp_path / "folder").mkdir()
    staged = [(one, paths[0], str(tmp_path / "folder")), (two, paths[2], str(tmp_path / "final"))]
    refused, done = calls.publish(staged, new, False)
    assert isinstance(refused, IsADirectoryError)
    assert refused.filename == paths[0]
    assert done is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "folder"]
    into = memoryview(bytearray(30_000))
    fetched = calls.fetch(
        [(paths[0], [into]), (str(tmp_path / "final"), [into]), (str(tmp_path), [into])], READ, bounce
    )
    assert [number_of(one) for one in fetched] == [errno.ENOENT, None, errno.EISDIR]
    assert fetched[1] == 20_000
    assert into[:20_000] == DATA[:20_000]


@pytest.mark.parametrize("locked", [True, False])
def test_a_name_is_taken_over_whole(
    calls: Files,
    tmp_path: Path,
    new: int,
    locked: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    before = descriptors()
    for number in range(1, 4):
        path = tmp_path / "file"
        unfinished = str(tmp_path / "unfinished")
        (fd,) = calls.stage([(unfinished, [DATA[: 7 * number]])], new, locked, None)
        assert isinstance(fd, int)
        assert calls.publish([(fd, unfinished, str(path))], new, locked) == [None]
        assert path.read_bytes() == DATA[: 7 * number]
        assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert descriptors() == before


def test_a_file_without_a_name_takes_one_over_under_a_lock(calls: Files, tmp_path: Path) -> None:
    """Others see its temporary name for a moment. Here that moment does not end well: somebody has the
    lock already, as if another descriptor of the file did."""
    path = tmp_path / "file"
    path.write_bytes(b"before")
    unfinished = str(tmp_path / "unfinished")
    (fd,) = calls.stage([(unfinished, [DATA[:9]])], NAMELESS, True, None)
    assert isinstance(fd, int)
    with Path(f"/proc/self/fd/{fd}").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (refused,) = calls.publish([(fd, unfinished, str(path))], NAMELESS, True)
    assert number_of(refused) == errno.EWOULDBLOCK
    assert isinstance(refused, OSError)
    assert refused.filename == unfinished
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"


def test_nobody_sees_a_file_without_a_name(calls: Files, tmp_path: Path, new: int) -> None:
    before = descriptors()
    path = tmp_path / "unfinished"
    (fd,) = calls.stage([(str(path), [DATA[:9]])], new, True, None)
    assert isinstance(fd, int)
    assert path.exists() is (new == NAMED)
    discard(fd, str(path))
    assert [*tmp_path.iterdir()] == []
    assert descriptors() == before


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
        (fd,) = calls.stage([(str(path), [DATA[:100]])], NAMED, True, None)
        assert isinstance(fd, int)
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if publishes:
            assert calls.publish([(fd, str(path), str(tmp_path / "final"))], NAMED, True) == [None]
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
        compiled.stage_files([(str(path), (part,) * 9)], NAMED, False, bounce)
    with pytest.raises(ValueError, match="no bytes"):
        compiled.stage_files([(str(path), (part,))], NAMED, False, bytearray())
    with pytest.raises(ValueError, match="null"):
        compiled.stage_files([("a\0b", (part,))], NAMED, False, bounce)
    with pytest.raises(TypeError):
        compiled.publish_files([7], NAMED, False)
    part.clear()  # Python refuses that while somebody has the buffer
    bounce.clear()


def test_others_run_while_files_are_written_and_read(compiled: Any, tmp_path: Path) -> None:
    """Nobody takes the interpreter away in this test, so who finds it busy was let in."""
    calls, memory = files(compiled), memoryview(mmap.mmap(-1, 8 << 20))
    busy = seen = False

    def keep_busy() -> None:
        nonlocal busy
        until = time.monotonic() + 60
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


# Columns

ADDRESS = address_of(1)
FILED = ADDRESS.column(7)
LENGTHS = [1, 240, 241, 4031, 4032, 4033, 10_000, 70_000]


def leaving(folder: Path, slot: memoryview, column: Column, victim: str | None = None) -> Leaving:
    """As it is admitted: with the header that the slot has now."""
    header = seal.identify(slot[:HEADER_BYTES], column)
    assert isinstance(header, Header)
    return f"{folder}/unfinished", f"{folder}/file", slot, column, header, FILED, victim


@pytest.mark.parametrize("length", LENGTHS)
def test_a_column_goes_into_a_file_and_comes_back(
    calls: Files, tmp_path: Path, bounce: memoryview | None, new: int, length: int
) -> None:
    slot, column = evicted(ADDRESS, length=length, tokens=17)
    header = seal.verify(slot, column)
    assert isinstance(header, Header)
    assert calls.store([leaving(tmp_path, slot, column)], new, True, bounce) == [None]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    file = (tmp_path / "file").read_bytes()
    assert file == b"".join(CLEAR.outgoing(slot, header, ADDRESS, 7))
    into = new_slot(length + PAGE)  # a larger one
    into[:HEADER_BYTES] = b"h" * HEADER_BYTES
    found = calls.load([(f"{tmp_path}/file", into, ADDRESS.column(0))], READ, bounce)
    assert found == [Header(17, 7, FILED.key, FILED.tag, header.checksum, length)]
    assert into[:HEADER_BYTES] == b"h" * HEADER_BYTES, "it is not sealed before the loop says so"
    assert into[HEADER_BYTES : len(file)] == file[HEADER_BYTES:]


def changed(slot: memoryview, what: str) -> None:
    """What may happen to a slot while its column is on its way to a file."""
    column = Column(ADDRESS.key, ADDRESS.tag, 7)
    if what == "emptied":
        slot[:HEADER_BYTES] = bytes(HEADER_BYTES)
    elif what == "opened":
        seal.open_slot(slot, 8)
    elif what == "evicted again":
        seal.write(slot, column._replace(sequence=8), 64, memoryview(payload_of(ADDRESS)))
    elif what == "of another org":
        seal.write(slot, column._replace(tag=BOLT), 64, memoryview(payload_of(ADDRESS)))
    elif what == "payload damaged":
        slot[HEADER_BYTES + 5000] ^= 1
    elif what == "header damaged":
        slot[6] ^= 1
    elif what == "other tokens":
        seal.write(slot, column, 63, memoryview(payload_of(ADDRESS)))
    elif what == "other bytes":
        seal.write(slot, column, 64, memoryview(payload_of(address_of(2))))
    elif what == "shorter":
        seal.write(slot, column, 64, memoryview(payload_of(ADDRESS, 9000)))
    elif what == "too long":
        slot[:HEADER_BYTES] = seal.pack(column, 64, seal.PAYLOAD_BYTES_MAX, 0)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("emptied", Miss.ABSENT),
        ("opened", Miss.TORN),
        ("evicted again", Miss.STALE),
        ("of another org", Miss.FOREIGN),
        ("payload damaged", Miss.CORRUPT),
        ("header damaged", Miss.CORRUPT),
        ("other tokens", Miss.TORN),
        ("other bytes", Miss.TORN),
        ("shorter", Miss.TORN),
        ("too long", Miss.CORRUPT),
    ],
)
def test_a_slot_that_changes_on_the_way_is_not_published(
    calls: Files, tmp_path: Path, bounce: memoryview | None, new: int, what: str, expected: Miss
) -> None:
    slot, column = evicted(ADDRESS)
    good, its_column = evicted(ADDRESS)
    before = descriptors()
    one, two = leaving(tmp_path, slot, column), leaving(tmp_path, good, its_column)
    changed(slot, what)
    assert calls.store([one, two], new, True, bounce) == [expected, None]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert descriptors() == before


def displaced(folder: Path, size: int = 12_288) -> Path:
    victim = folder / "victim"
    victim.write_bytes(b"v" * size)
    return victim


def test_a_column_is_written_over_what_it_displaces(
    calls: Files, tmp_path: Path, bounce: memoryview | None, new: int
) -> None:
    victim, (slot, column) = displaced(tmp_path), evicted(ADDRESS)
    before = descriptors()
    with victim.open("rb") as reader:
        wanted = leaving(tmp_path, slot, column, str(victim))
        assert calls.store([wanted], new, True, bounce) == [None]
        is_same = reader.read() == file_of()
    assert is_same is (new == NAMELESS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == file_of()
    assert descriptors() == before


@pytest.mark.parametrize(
    "what", ["larger", "smaller", "two names", "no file", "link", "pipe", "unlocked"]
)
def test_what_is_displaced_is_gone_where_it_can_t_be_written_over(
    calls: Files, tmp_path: Path, new: int, what: str
) -> None:
    victim = displaced(tmp_path, {"larger": 16_384, "smaller": 8192}.get(what, 12_288))
    other = tmp_path / "other"
    other.write_bytes(victim.read_bytes())
    if what == "two names":
        other.unlink()
        other.hardlink_to(victim)
    elif what in ("no file", "link", "pipe"):
        victim.unlink()
        if what == "link":
            victim.symlink_to(other)
        elif what == "pipe":
            os.mkfifo(victim)
    slot, column = evicted(ADDRESS)
    before = descriptors()
    wanted = leaving(tmp_path, slot, column, str(victim))
    assert calls.store([wanted], new, what != "unlocked", None) == [None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]
    assert (tmp_path / "file").read_bytes() == file_of()
    assert set(other.read_bytes()) == {ord("v")}
    assert descriptors() == before


def test_what_another_agent_writes_over_is_left_to_it(calls: Files, tmp_path: Path, new: int) -> None:
    victim, (slot, column) = displaced(tmp_path), evicted(ADDRESS)
    with victim.open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert calls.store([leaving(tmp_path, slot, column, str(victim))], new, True, None) == [None]
        assert set(owner.read()) == {ord("v")}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_another_agent_has_stored_under_another_name_before_the_lock_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote another column over the victim; then it stored the victim again, in a file of its own."""
    victim, (slot, column), locks = displaced(tmp_path), evicted(ADDRESS), fcntl.flock

    def late(fd: int, how: int) -> None:
        victim.rename(tmp_path / "another")
        displaced(tmp_path)
        locks(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    wanted = leaving(tmp_path, slot, column, str(victim))
    assert PYTHON_FILES.store([wanted], NAMELESS, True, None) == [None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "file"]
    assert set((tmp_path / "another").read_bytes()) == {ord("v")}
    assert (tmp_path / "file").read_bytes() == file_of()


def test_what_can_t_be_displaced_says_so_and_nothing_is_made(
    calls: Files, tmp_path: Path, new: int
) -> None:
    victim, (slot, column) = tmp_path / "victim", evicted(ADDRESS)
    victim.mkdir()
    (refused,) = calls.store([leaving(tmp_path, slot, column, str(victim))], new, True, None)
    assert isinstance(refused, IsADirectoryError)
    assert refused.filename == str(victim)
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_nothing_is_left_of_what_is_not_written_over_to_the_end(
    calls: Files, tmp_path: Path, bounce: memoryview | None, new: int
) -> None:
    """The disk takes a page and no more; or the slot changes; or there is no directory to go to."""
    slot, column = evicted(ADDRESS)
    before, limit = descriptors(), resource.getrlimit(resource.RLIMIT_FSIZE)
    wanted = leaving(tmp_path, slot, column, str(displaced(tmp_path)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, limit[1]))
    try:
        (refused,) = calls.store([wanted], new, True, bounce)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert number_of(refused) == errno.EFBIG
    assert [*tmp_path.iterdir()] == []
    missing = leaving(tmp_path / "no", slot, column, str(displaced(tmp_path)))
    (unstaged,) = calls.store([missing], new, True, bounce)
    assert isinstance(unstaged, FileNotFoundError)
    assert unstaged.filename == missing[0], "so that its directory is made"
    assert [*tmp_path.iterdir()] == []
    wanted = leaving(tmp_path, slot, column, str(displaced(tmp_path)))
    changed(slot, "evicted again")
    assert calls.store([wanted], new, True, bounce) == [Miss.STALE]
    assert [*tmp_path.iterdir()] == []
    assert descriptors() == before


def test_a_slot_is_looked_at_after_its_bytes_are_written(calls: Files, tmp_path: Path, new: int) -> None:
    """Here the bytes go through the slot itself, which the header of the file destroys."""
    slot, column = evicted(ADDRESS)
    assert calls.store([leaving(tmp_path, slot, column)], new, True, slot) == [Miss.STALE]
    assert [*tmp_path.iterdir()] == []


def file_of(length: int = 10_000) -> bytearray:
    slot, column = evicted(ADDRESS, length=length)
    header = seal.verify(slot, column)
    assert isinstance(header, Header)
    return bytearray(b"".join(CLEAR.outgoing(slot, header, ADDRESS, 7)))


def loaded(
    calls: Files, path: Path, file: bytes | bytearray, bounce: memoryview | None, length: int
) -> object:
    path.write_bytes(file)
    (found,) = calls.load([(str(path), new_slot(length), ADDRESS.column(0))], READ, bounce)
    return found


@pytest.mark.parametrize("offset", [0, 4, 5, 6, 16, 32, 40, 48, 56, 60, 64, 4095, 4096, 10_063])
def test_no_flipped_bit_comes_back(
    calls: Files, tmp_path: Path, bounce: memoryview | None, offset: int
) -> None:
    file = file_of()
    file[offset] ^= 4
    assert loaded(calls, tmp_path / "file", file, bounce, 10_000) is Miss.CORRUPT


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4095, 4096, 8192, 12_287])
def test_half_a_file_does_not_come_back(
    calls: Files, tmp_path: Path, bounce: memoryview | None, size: int
) -> None:
    assert loaded(calls, tmp_path / "file", file_of()[:size], bounce, 10_000) is Miss.TORN


def test_no_other_file_comes_back(calls: Files, tmp_path: Path, bounce: memoryview | None) -> None:
    path, file = tmp_path / "file", file_of()

    def found(file: bytes | bytearray, length: int = 10_000) -> object:
        return loaded(calls, path, file, bounce, length)

    def sealed(column: Column, tokens: int = 64) -> bytes:
        return seal.pack(column, tokens, 10_000, seal.read(file[:HEADER_BYTES]).checksum) + file[64:]  # type: ignore[union-attr]

    assert isinstance(found(sealed(ADDRESS.column(2**64 - 1))), Header), "with any note"
    assert found(bytes(12_288)) is Miss.TORN, "its blocks never came"
    assert found(file + bytes(PAGE), 20_000) is Miss.CORRUPT, "too long"
    assert found(file, 4000) is Miss.CORRUPT, "it does not fit"
    assert found(sealed(address_of(1, BOLT).column(7))) is Miss.FOREIGN
    assert found(sealed(address_of(2).column(7))) is Miss.STALE
    assert found(sealed(address_of(1, shard="full-1").column(7))) is Miss.STALE
    assert found(sealed(ADDRESS.column(7, encrypted=True))) is Miss.STALE
    opened = bytearray(file)
    opened[5] = 1
    assert found(opened) is Miss.TORN
    path.unlink()
    path.symlink_to("/dev/zero")
    (refused,) = calls.load([(str(path), new_slot(), FILED)], READ, bounce)
    assert number_of(refused) == errno.ELOOP


def test_an_error_of_a_column_says_what_could_not_be_done(
    calls: Files, tmp_path: Path, bounce: memoryview | None, new: int
) -> None:
    slot, column = evicted(ADDRESS)
    before = descriptors()
    missing = leaving(tmp_path / "no" / "folder", slot, column)
    (tmp_path / "taken").mkdir()
    unfinished, _, *rest = leaving(tmp_path, slot, column)
    unstaged, refused = calls.store(
        [missing, (unfinished, f"{tmp_path}/taken", *rest)],  # type: ignore[list-item]
        new,
        True,
        bounce,
    )
    assert isinstance(unstaged, FileNotFoundError)
    assert unstaged.filename == missing[0]
    assert isinstance(refused, IsADirectoryError)
    assert refused.filename == f"{tmp_path}/taken"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"], "nothing is left of it"
    (absent,) = calls.load([(f"{tmp_path}/none", new_slot(), FILED)], READ, bounce)
    assert isinstance(absent, FileNotFoundError)
    assert descriptors() == before


def test_nothing_is_held_after_columns_were_moved(compiled: Any, tmp_path: Path) -> None:
    memory = bytearray(slot_bytes_for(10_000))
    slot, column = evicted(ADDRESS)
    memory[:] = slot
    unfinished, path, _, *rest = leaving(tmp_path, slot, column)
    store, load = compiled.store_columns, compiled.load_columns
    assert store([(unfinished, path, memory, *rest)], NAMED, False, None) == [None]
    load([(path, memory, FILED)], READ, None)
    for wrong in ([7], [(path, memory)], [(path, memory, FILED), (path, bytes(4096), FILED)]):
        with pytest.raises((TypeError, BufferError)):
            load(wrong, READ, None)
    for other in ([(path, memory, *rest)], [(unfinished, path, memory, 7, *rest[1:])]):
        with pytest.raises(TypeError):
            store(other, NAMED, False, None)
    for small in (memory[:63], memory[:10_063]):
        with pytest.raises(ValueError, match=r"64 bytes or more|does not fit its slot"):
            store([(unfinished, path, small, *rest)], NAMED, False, None)
    with pytest.raises(ValueError, match="no bytes"):
        load([(path, memory, FILED)], READ, bytearray())
    with pytest.raises(ValueError, match="16 bytes"):
        load([(path, memory, (b"short", FILED.tag, 0))], READ, None)
    memory.clear()  # Python refuses that while somebody has the buffer
