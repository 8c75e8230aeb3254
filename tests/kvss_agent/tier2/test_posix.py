"""Directories as they are: agents that are killed, disks that are full, mounts that can do less."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvss_agent.tier2 import posix
from kvss_agent.tier2.address import Scope
from kvss_agent.tier2.backend import Failed, Outgoing
from kvss_agent.tier2.column_file import PAGE
from kvss_agent.tier2.files import PYTHON_FILES, files
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import ABANDONED_SECONDS, BOUNCE_BYTES, TEMPORARY, Posix
from kvss_agent.tier2.store import Outcome
from tests.kvss_agent.tier2 import crashing
from tests.kvss_agent.tier2.columns import (
    ACME,
    PLENTY,
    address_of,
    disk_bytes,
    files_in,
    get,
    opened,
    put,
    put_many,
)
from tests.kvss_agent.tier2.crashing import LENGTH
from tests.kvss_agent.tier2.faulty import Held
from tests.processes import start

COLUMN_BYTES = 12_288
MNT_DETACH = 2


@pytest.fixture(params=["python", "native"], autouse=True)
def system_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test is done by both kinds of system calls."""
    made = files(request.getfixturevalue("compiled")) if request.param == "native" else PYTHON_FILES
    monkeypatch.setattr(posix, "system_files", lambda _: made)
    return str(request.param)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount where a file has a name from the start."""
    monkeypatch.setattr(posix, "_can_be_nameless", lambda _: False)


def written(store: Posix, name: str, parts: Sequence[memoryview]) -> bool | Failed:
    (stored,) = store.write([Outgoing(name, parts, lambda: True)])
    return stored


def unfinished(root: Path) -> list[Path]:
    return [path for path in files_in(root) if path.name.startswith(TEMPORARY)]


# Killed


def spill_and_be_killed(root: Path, cap: int, first: int, columns: int, *options: str) -> list[int]:
    """Start an agent, kill it after so many columns: those that it called stored, as they came."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as output:
        with os.fdopen(writing, "w"):
            arguments = str(root), str(cap), str(first), *options
            agent = start(crashing.__name__, *arguments, descriptors={1: writing})
        lines = [output.readline() for _ in range(columns)]
        agent.kill()
        lines += output.readlines()
        agent.wait()
    assert all(line.endswith(" stored\n") for line in lines)
    return [int(line.split()[0]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [("named",), ()])
async def test_a_killed_agent_leaves_nothing_wrong_behind(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Killed in the middle of spills that displace others, again and again; each time the next start
    puts it right."""
    cap = 12 * (LENGTH + 4096)
    found_unfinished = life = 0
    while life < 4 or not found_unfinished:
        assert life < 40, "none of the kills hit a writer: this has shown nothing"
        stored = spill_and_be_killed(tmp_path, cap, life * 1000, 10 + 7 * (life % 8), *options)
        found_unfinished += len(unfinished(tmp_path))
        assert disk_bytes(tmp_path) <= cap
        async with opened(tmp_path, Caps(cap, cap)) as store:
            assert unfinished(tmp_path) == []
            assert disk_bytes(tmp_path) == store.stats().bytes
            assert await get(store, address_of(stored[-1]), LENGTH) == "hit"
            numbers = range(life * 1000, stored[-1] + 10)
            found = [await get(store, address_of(number), LENGTH) for number in numbers]
            assert set(found) <= {"hit", "absent"}
        life += 1


@pytest.mark.usefixtures("named")
async def test_an_unfinished_file_of_a_living_writer_stays(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    async with opened(backend) as store:
        writing = asyncio.create_task(put(store, address_of(1)))
        await backend.reached("write")
        async with opened(tmp_path) as other:
            assert len(unfinished(tmp_path)) == 1
            assert other.stats().properties["unfinished_files_removed"] == 0
        await store.rebuild()
        backend.go("write")
        backend.go("read")
        assert await writing == "stored"
        assert await get(store, address_of(1)) == "hit"


# Full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mount = tmp_path / "small"
    mount.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(mount), b"tmpfs", 0, b"size=1m,mode=700"):
        pytest.skip(f"root may not mount here: {os.strerror(ctypes.get_errno())}")
    try:
        yield mount
    finally:
        assert libc.umount2(bytes(mount), MNT_DETACH) == 0


async def test_a_disk_that_is_fuller_than_the_cap_says_is_lived_with(small_disk: Path) -> None:
    async with opened(small_disk) as store:
        outcomes = [await put(store, address_of(number), 100_000) for number in range(40)]
        assert set(outcomes) == {Outcome.STORED, Outcome.FAILED}
        stats = store.stats()
        assert stats.faults == {"no-space": outcomes.count(Outcome.FAILED)}
        assert stats.evicted.columns > 0
        assert unfinished(small_disk) == []
        assert disk_bytes(small_disk) == stats.bytes
        recalled = [await get(store, address_of(number), 100_000) for number in range(40)]
        assert set(recalled) == {"hit", "absent"}
        assert recalled.count("hit") == stats.columns


# What a mount can do


async def test_a_disk_that_is_full_at_the_start_is_read_and_emptied_and_then_written_to(
    small_disk: Path,
) -> None:
    async with opened(small_disk / "files") as store:
        assert await put_many(store, [address_of(number) for number in range(9)]) == ["stored"] * 9
        expected = store.stats().properties
    other = small_disk / "of others"
    with contextlib.suppress(OSError), other.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    async with opened(small_disk / "files") as store:
        assert await get(store, address_of(1)) == "hit"
        assert await put(store, address_of(9)) == Outcome.FAILED
        assert set(store.stats().faults) == {"no-space"}
        assert (await store.purge(tag=ACME)).columns == 8, "one made room for the next"
        other.unlink()
        await store.expire()
        assert store.stats().properties == expected
        assert await put(store, address_of(9)) == "stored"


async def test_a_disk_that_is_read_only_at_the_start_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as store:
        assert await put(store, address_of(1)) == "stored"

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Posix, "_probe", refuse)
    async with opened(tmp_path) as store:
        assert await get(store, address_of(1)) == "hit"


async def test_without_direct_io_it_works_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(path: Path) -> bool:
        return False

    monkeypatch.setattr(posix, "_can_be_direct", cannot)
    async with opened(tmp_path) as store:
        assert store.stats().properties["direct_io"] is False
        assert await put(store, address_of(1)) == "stored"
        assert await get(store, address_of(1)) == "hit"


def test_a_mount_that_opens_for_direct_io_and_then_refuses_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(fd: int, parts: object, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    store = Posix(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", refuses)
        store.open()
    assert store.properties()["direct_io"] is False


@pytest.mark.usefixtures("named")
async def test_what_another_agent_sweeps_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system_files: str
) -> None:
    if system_files == "native":
        pytest.skip("compiled code calls the kernel, not Python's os")
    lock, swept = fcntl.flock, 0

    def late(fd: int, operation: int) -> None:
        nonlocal swept
        for path in unfinished(tmp_path)[: swept in (0, 2)]:  # the probe's file, then a column's
            path.unlink()
        swept += 1
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    async with opened(tmp_path) as store:
        assert swept == 2
        assert store.stats().properties["locks"] is True
        assert await put(store, address_of(1)) == "stored"
        assert swept == 4
        assert await get(store, address_of(1)) == "hit"


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT])
@pytest.mark.parametrize("call", ["open", "link"])
async def test_where_a_file_cannot_do_without_a_name_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, refusal: int
) -> None:
    if call == "open":
        known = os.open

        def refuses(path: str, flags: int, *more: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(refusal, os.strerror(refusal))
            return known(path, flags, *more)

        monkeypatch.setattr(os, "open", refuses)
    else:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(refusal, os.strerror(refusal))

        monkeypatch.setattr(os, "link", refuse)
    async with opened(tmp_path) as store:
        assert store.stats().properties["nameless"] is False
        assert await put(store, address_of(1)) == "stored"
        assert await get(store, address_of(1)) == "hit"
        assert unfinished(tmp_path) == []


def test_a_file_that_was_made_with_a_name_is_published_so(tmp_path: Path) -> None:
    """The disk was full at the start, and room comes while files are being written."""
    for turn in range(2):
        store = Posix(tmp_path)
        known = store._calls.stage

        def stage(*arguments: Any, to: Posix = store, known: Any = known) -> Any:
            staged = known(*arguments)
            to.tidy()
            return staged

        store._calls = store._calls._replace(stage=stage)
        page = bytes([turn]) * PAGE
        assert written(store, address_of(1).name, [memoryview(page)]) is True
        assert unfinished(tmp_path) == []
        assert (tmp_path / address_of(1).name).read_bytes() == page


async def test_a_file_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    async with opened(backend) as store:
        if not store.stats().properties["nameless"]:
            pytest.skip("each file has a name here")
        writing = asyncio.create_task(put(store, address_of(1)))
        await backend.reached("write")
        assert files_in(tmp_path) == []
        backend.go("write")
        backend.go("read")
        assert await writing == "stored"
        assert await get(store, address_of(1)) == "hit"


async def test_without_locks_an_unfinished_file_goes_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    async with opened(tmp_path) as store:
        assert store.stats().properties["locks"] is False
        assert await put(store, address_of(1)) == "stored"
        folder = files_in(tmp_path)[0].parent
        young, old = folder / f"{TEMPORARY}young", folder / f"{TEMPORARY}old"
        young.touch()
        old.touch()
        then = time.time() - ABANDONED_SECONDS - 1
        os.utime(old, (then, then))
        await store.rebuild()
        assert unfinished(tmp_path) == [young]


async def test_a_durable_store_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr(os, "fsync", sync)
    for durable, expected in ((False, 0), (True, 2)):
        synced.clear()
        async with opened(Posix(tmp_path / str(durable), durable=durable)) as store:
            await put(store, address_of(1))
            assert len(synced) == expected
            assert (await store.purge(tag=ACME)).columns == 1
            assert len(synced) == expected + 1, "a purge lasts in any case"


async def test_a_file_of_which_the_disk_does_not_say_that_it_lasts_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(errno.EIO, "Input/output error")

    async with opened(Posix(tmp_path, durable=True)) as store:
        monkeypatch.setattr(os, "fsync", sync)
        assert await put(store, address_of(1)) == Outcome.FAILED
        assert files_in(tmp_path) == []
        assert store.stats().bytes == 0


@pytest.mark.parametrize("length", [10_000, 50_000])
async def test_short_writes_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system_files: str, length: int
) -> None:
    """The kernel may do less than it is asked to, and it is asked again."""
    if system_files == "native":
        pytest.skip("compiled code calls the kernel, not Python's os")
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: write(fd, [parts[0][:4096]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:4096]], at))
    async with opened(tmp_path) as store:
        assert await put(store, address_of(1), length) == "stored"
        assert await get(store, address_of(1), length) == "hit"


# The huge page


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "size", [PAGE, 9 * PAGE, BOUNCE_BYTES - PAGE, BOUNCE_BYTES, BOUNCE_BYTES + PAGE, 3 * BOUNCE_BYTES]
)
def test_a_file_is_what_its_parts_were_however_it_went(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    direct: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    if not direct:
        monkeypatch.setattr(posix, "_can_be_direct", lambda _: False)
    store = Posix(tmp_path)
    store.open()
    memory = [memoryview(mmap.mmap(-1, size)) for _ in range(2)]
    memory[0][:] = random.Random(size).randbytes(size)
    cuts = [0, 64, 64, size - 1000, size]
    out, back = ([m[a:b] for a, b in itertools.pairwise(cuts)] for m in memory)
    assert written(store, "a" * 32, out) is True
    assert (tmp_path / ("a" * 32)).read_bytes() == memory[0]
    assert store.read([("a" * 32, back)]) == [size]
    assert memory[1] == memory[0]
    larger = memoryview(mmap.mmap(-1, size + 40 * PAGE))
    assert store.read([("a" * 32, [larger])]) == [size]
    assert larger[:size] == memory[0]
    assert not any(larger[size:])


def test_each_thread_has_one_huge_page_once_it_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[memoryview] = []
    make = posix._huge_page

    def remember() -> memoryview:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(posix, "_huge_page", remember)
    store = Posix(tmp_path)
    store.open()
    if not store.properties()["direct_io"]:
        pytest.skip("no direct I/O here")
    assert made == []
    page = memoryview(mmap.mmap(-1, PAGE))
    for _ in range(2):
        written(store, "a", [page])
        store.read([("a", [page])])
    assert len(made) == 1
    thread = threading.Thread(target=store.read, args=([("a", [page])],))
    thread.start()
    thread.join()
    assert [len(page) for page in made] == [BOUNCE_BYTES] * 2
    assert all(ctypes.addressof(ctypes.c_char.from_buffer(page)) % BOUNCE_BYTES == 0 for page in made)


async def test_files_are_for_the_agent_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"
    async with opened(root) as store:
        await put(store, address_of(1))
    assert root.stat().st_mode & 0o077 == 0
    assert files_in(root)[0].stat().st_mode & 0o077 == 0


async def test_a_link_in_the_place_of_a_column_is_not_followed(tmp_path: Path) -> None:
    async with opened(tmp_path / "store") as store:
        await put(store, address_of(1))
        path = tmp_path / "store" / address_of(1).name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert await get(store, address_of(1)) == "lost"
        assert store.stats().faults == {"other": 1}


@pytest.mark.parametrize("level", ["namespace", "tag", "inside"])
async def test_a_purge_follows_no_link_out_of_the_store(tmp_path: Path, level: str) -> None:
    ours = tmp_path / "ours"
    (ours / ACME.hex()).mkdir(parents=True)
    (ours / "key").write_text("secret")
    (ours / ACME.hex() / "key").write_text("secret")
    root = tmp_path / "store"
    address = address_of(1)
    async with opened(root) as store:
        await put(store, address_of(2))
        namespace, tag = root / address.namespace.hex(), address.tag.hex()
        if level == "namespace":
            await store.purge(tag=address.tag)
            namespace.symlink_to(ours)
        elif level == "tag":
            await store.purge(tag=address.tag)
            namespace.mkdir()
            (namespace / tag).symlink_to(ours)
        else:
            (namespace / tag / "00").symlink_to(ours)
        await store.purge(tag=address.tag, namespace=address.namespace)
        assert sorted(path.name for path in ours.rglob("*")) == [ACME.hex(), "key", "key"]
        assert await put(store, address_of(3)) == "stored", "the link is gone"
        assert files_in(root) == [root / address_of(3).name]


async def test_a_pipe_in_the_place_of_a_column_holds_nobody_up(tmp_path: Path) -> None:
    async with opened(tmp_path, threads=1) as store:
        await put(store, address_of(2))
        pipe = tmp_path / address_of(1).name
        pipe.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipe)
        async with asyncio.timeout(30):
            assert await get(store, address_of(1)) != "hit"
            assert await get(store, address_of(2)) == "hit"
            await store.purge(tag=ACME)


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
async def test_what_is_no_file_and_has_the_name_of_an_unfinished_one_is_left_alone(
    tmp_path: Path, kind: str
) -> None:
    strange = tmp_path / f"{TEMPORARY}x"
    if kind == "pipe":
        os.mkfifo(strange)
    elif kind == "directory":
        strange.mkdir()
    else:
        strange.symlink_to("/nowhere")
    async with asyncio.timeout(30), opened(tmp_path) as store:
        assert await put(store, address_of(1)) == "stored"
    assert [one.name for one in os.scandir(tmp_path) if one.name.startswith(TEMPORARY)] == [strange.name]


# Others who purge


async def test_a_directory_that_is_purged_under_a_writer_is_made_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        for number in range(10):
            await put(one, address_of(number))
            await two.purge(tag=ACME)
        assert await put(one, address_of(99)) == "stored"


async def test_a_file_that_is_purged_under_its_writer_is_a_fault_and_no_crash(tmp_path: Path) -> None:
    backend = Held(tmp_path)
    async with opened(backend, PLENTY) as one, opened(tmp_path) as two:
        writing = asyncio.create_task(put(one, address_of(1)))
        await backend.reached("write")
        await two.purge(tag=ACME)
        backend.go("write")
        assert await writing == Outcome.FAILED
        assert one.stats().faults == {"vanished": 1}
        assert one.stats().bytes == 0
        assert files_in(tmp_path) == []


def test_a_purge_that_others_write_against_gives_up_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Posix(tmp_path)
    store.open()
    name = address_of(1).name
    remove = posix._remove_tree

    def remove_and_write(root: Path, folder: str) -> object:
        removed, _ = remove(root, folder)
        assert written(store, name, [memoryview(bytearray(4096))]) is True
        return removed, False

    store._direct = 0
    written(store, name, [memoryview(bytearray(4096))])
    monkeypatch.setattr(posix, "_remove_tree", remove_and_write)
    with pytest.raises(Failed, match="others keep writing"):
        store.purge(Scope(tag=ACME))
