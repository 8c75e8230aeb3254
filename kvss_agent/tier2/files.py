"""Whole files by system calls: several made, several published, several read in one go; and several
columns moved between slots and files, with all checks.

There are two that do the same: this one, and one in compiled code (`native/files.c`, `native/moves.c`),
which a mover may have. That one asks for the interpreter once for all files instead of a few times for
each; with as many threads as tier 2 has, small files spend their time on waiting for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard.seal import Column, Header, Miss, verify
from kvss_agent.tier2.column_file import PAGE, landing, parts_of

_COPY_BYTES: Final = 256 << 10  # in one step of the interpreter
_T = TypeVar("_T")

File = tuple[str, Sequence[memoryview]]  # its path, and what it consists of
Staged = tuple[int, str, str]  # a descriptor, its temporary path, and the one to come
# Both paths; a slot, what it holds with its header, and what the header of the file says; the path of
# what it displaces.
Leaving = tuple[str, str, memoryview, Column, Header, Column, str | None]
Arriving = tuple[
    str, memoryview, Column
]  # its path, a slot, and what the file's header says, with any note


class Files(NamedTuple):
    """All of these, as fast as they can be had with one mover.

    What the kernel refuses is the answer for that file, and the others go on. All bytes go through
    `bounce` if there is one: memory as direct I/O wants it, which one thread uses at a time.

    With O_TMPFILE among the flags a file has no name until it is published.
    """

    stage: Callable[[Sequence[File], int, bool, memoryview | None], list[int | OSError]]
    publish: Callable[[Sequence[Staged], int, bool], list[OSError | None]]
    fetch: Callable[[Sequence[File], int, memoryview | None], list[int | OSError]]
    store: Callable[[Sequence[Leaving], int, bool, memoryview | None], list[Miss | OSError | None]]
    load: Callable[[Sequence[Arriving], int, memoryview | None], list[Header | Miss | OSError]]


def files(mover: Mover = PYTHON) -> Files:
    """Compiled movers do it by themselves."""
    compiled = [getattr(mover, name, None) for name in _COMPILED]
    return Files(*compiled) if all(compiled) else PYTHON_FILES  # type: ignore[arg-type]


def stage(
    wanted: Sequence[File],
    flags: int,
    locked: bool,  # noqa: FBT001 - compiled code has no names for arguments
    bounce: memoryview | None,
) -> list[int | OSError]:
    """Make these files and leave them open, locked if so wanted and they have names; of one that fails
    nothing is left."""
    return [_answer(_make, *file, flags, locked, bounce) for file in wanted]


def publish(
    staged: Sequence[Staged],
    flags: int,
    locked: bool,  # noqa: FBT001 - as of `stage`
) -> list[OSError | None]:
    """Give the files their names, in place of what had them, and close them; what fails is removed.
    `flags` and `locked` as they were staged."""
    return [_answer(_publish, *one, flags, locked) for one in staged]


def fetch(wanted: Sequence[File], flags: int, bounce: memoryview | None) -> list[int | OSError]:
    """Fill the parts from the start of each file; how many bytes came."""

    return [_answer(_read, *file, flags, bounce) for file in wanted]


def store(
    wanted: Sequence[Leaving],
    flags: int,
    locked: bool,  # noqa: FBT001 - as of `stage`
    bounce: memoryview | None,
) -> list[Miss | OSError | None]:
    """Publish the files of these columns; what they displace is gone first. Where a slot is not as
    its header says once its bytes are written, the answer is why, and nothing is left. An error of
    publishing names the path to come, one of removing what is displaced that path, any other one the
    unfinished path."""

    def put(
        unfinished: str,
        path: str,
        slot: memoryview,
        evicted: Column,
        header: Header,
        filed: Column,
        victim: str | None,
    ) -> Miss | None:
        parts, how = parts_of(slot, header, filed), flags
        fd = None
        if victim is not None:
            fd = _take_over(victim, unfinished, sum(map(len, parts)), flags, locked)
        if fd is None:
            fd = _make(unfinished, parts, flags, locked, bounce)
        else:
            how = _named(flags)
            _fill(fd, unfinished, parts, bounce)
        found = verify(slot, evicted)
        if found != header:
            discard(fd, unfinished)
            return found if isinstance(found, Miss) else Miss.TORN
        try:
            _publish(fd, unfinished, path, how, locked)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        return None

    return [_answer(put, *one) for one in wanted]


def load(
    wanted: Sequence[Arriving], flags: int, bounce: memoryview | None
) -> list[Header | Miss | OSError]:
    """Bring columns back into slots, whose headers stay as they are. The answer is the header of the
    file, or why it is not that column's; then the payload of the slot may hold anything."""

    def get(path: str, slot: memoryview, filed: Column) -> Header | Miss:
        place = landing(slot, filed, PYTHON)
        return place.accept(_read(path, place.parts, flags, bounce))

    return [_answer(get, *one) for one in wanted]


def unless_swept(fd: int, path: str) -> None:
    """Before it was locked it looked like a dead writer's. Raises FileNotFoundError if it is gone."""
    if os.fstat(fd).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def link(fd: int, path: str) -> None:
    """Give a file that has no name this one, which nothing has."""
    # Any `src_dir_fd` makes Python follow the link; else it would be given the name itself.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def discard(fd: int, unfinished: str) -> None:
    """Away with a file that is not to be published."""
    with contextlib.suppress(OSError):  # it has no name yet; and the first fault is the one to tell
        os.unlink(unfinished)  # noqa: PTH108
    os.close(fd)


PYTHON_FILES: Final = Files(stage, publish, fetch, store, load)
_COMPILED: Final = ("stage_files", "publish_files", "fetch_files", "store_columns", "load_columns")


def _answer(call: Callable[..., _T], *arguments: object) -> _T | OSError:
    try:
        return call(*arguments)
    except OSError as error:
        return error


def _make(
    path: str,
    parts: Sequence[memoryview],
    flags: int,
    locked: bool,  # noqa: FBT001 - as of `stage`
    bounce: memoryview | None,
) -> int:
    nameless = _are_nameless(flags)
    try:
        fd = os.open(os.path.dirname(path) if nameless else path, flags, 0o600)  # noqa: PTH120
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    try:
        if locked and not nameless:  # nobody sees a file that has no name
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unless_swept(fd, path)
    except OSError:
        discard(fd, path)
        raise
    _fill(fd, path, parts, bounce)
    return fd


def _fill(fd: int, path: str, parts: Sequence[memoryview], bounce: memoryview | None) -> None:
    try:
        _write_all(fd, parts, bounce)
    except OSError:
        discard(fd, path)
        raise


def _take_over(
    victim: str,
    unfinished: str,
    size: int,
    flags: int,
    locked: bool,  # noqa: FBT001 - as of `stage`
) -> int | None:
    """The file that the victim leaves, to be written over: it has the unfinished name now, and is locked
    and of this size. None: the victim is gone, and so is its file. Raises OSError if it can't be."""
    if not locked or not _are_nameless(flags):  # no disk of this machine
        _remove(victim)
        return None
    with contextlib.ExitStack() as opened:
        try:
            fd = os.open(victim, _named(flags) | os.O_NOFOLLOW | os.O_NONBLOCK)
            opened.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(victim, unfinished)  # noqa: PTH104 - as above
        except OSError:
            _remove(victim)
            return None
        with contextlib.suppress(OSError):
            found, named = os.fstat(fd), os.lstat(unfinished)
            # Not what was renamed: before the lock another agent stored it under another name. And with
            # two names it is somebody's copy as well.
            if (
                os.path.samestat(found, named)
                and stat.S_ISREG(found.st_mode)
                and found.st_nlink == 1
                and found.st_size == size
            ):
                opened.pop_all()
                return fd
            os.unlink(unfinished)  # noqa: PTH108
        return None


def _remove(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise OSError(error.errno, error.strerror, path) from error


def _publish(
    fd: int,
    unfinished: str,
    path: str,
    flags: int,
    locked: bool,  # noqa: FBT001 - as of `stage`
) -> None:
    try:
        if _are_nameless(flags):
            _link(fd, unfinished, path, locked=locked)
        else:
            os.rename(unfinished, path)  # noqa: PTH104 - Path costs as much as the call
    except OSError as error:
        discard(fd, unfinished)
        raise OSError(error.errno, error.strerror, unfinished) from error
    os.close(fd)


def _link(fd: int, unfinished: str, path: str, *, locked: bool) -> None:
    """Where another file has the name, a temporary one has to do first, since only a rename replaces: it
    is locked before others see it."""
    try:
        link(fd, path)
    except FileExistsError:
        if locked:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        link(fd, unfinished)
        os.rename(unfinished, path)  # noqa: PTH104 - as above


def _named(flags: int) -> int:
    """The flags of a file that has a name already."""
    return flags & ~(os.O_TMPFILE | os.O_CREAT | os.O_EXCL)


def _are_nameless(flags: int) -> bool:
    return flags & os.O_TMPFILE == os.O_TMPFILE


def _read(path: str, parts: Sequence[memoryview], flags: int, bounce: memoryview | None) -> int:
    fd = os.open(path, flags)
    try:
        return _read_all(fd, parts, bounce)
    finally:
        os.close(fd)


def _write_all(fd: int, parts: Sequence[memoryview], bounce: memoryview | None) -> None:
    offset, left = 0, list(parts)
    while left:
        now = left
        if bounce is not None:
            now = [bounce[: sum(map(len, left))]]
            for part, place in _side_by_side(left, bounce):
                place[:] = part
        written = os.pwritev(fd, now, offset)
        offset += written
        left = _beyond(left, written)


def _read_all(fd: int, parts: Sequence[memoryview], bounce: memoryview | None) -> int:
    offset, left = 0, list(parts)
    while left:
        now = left if bounce is None else [bounce[: sum(map(len, left))]]
        got = os.preadv(fd, now, offset)
        if bounce is not None:
            for part, piece in _side_by_side(left, bounce[:got]):
                part[:] = piece
        offset += got
        if got == 0 or (bounce is not None and got % PAGE):  # the end: direct I/O stops nowhere else
            break
        left = _beyond(left, got)
    return offset


def _side_by_side(
    parts: Sequence[memoryview], bounce: memoryview
) -> Iterator[tuple[memoryview, memoryview]]:
    """What belongs together, from the start and as far as it goes, in pieces."""
    at = 0
    for part in parts:
        for start in range(0, len(part), _COPY_BYTES):
            length = min(_COPY_BYTES, len(part) - start, len(bounce) - at)
            if not length:
                return
            yield part[start : start + length], bounce[at : at + length]
            at += length


def _beyond(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of these parts after so many bytes."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left
