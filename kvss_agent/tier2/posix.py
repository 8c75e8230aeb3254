"""Column files in a directory: a local disk, or any mount that several agents share.

A file has no name until it is whole (O_TMPFILE), so nobody ever sees half of it, and of a writer that
dies nothing is left. Where a mount cannot do that, it is written under a temporary name in its own
directory and then renamed. So is a file that is written over one that it displaces, which saves to make
the one and to remove the other. The writer holds a lock on its temporary file; the kernel lets go of it
when the writer dies, however it dies, and whoever lists the store next removes the file.

Where the file system allows it, bytes bypass the page cache (O_DIRECT): they will be read by the one
who has them in DRAM, hardly ever twice, and cached pages would take memory from the arenas. All but
small columns go through a huge page on their way: a disk is told of each run of adjacent pages apart,
and an arena's pages are scattered, so a copy by the processor costs less than it saves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from kvss_agent.mover import PYTHON, Mover, zero
from kvss_agent.process.durable_file import sync_directory
from kvss_agent.shard.seal import Header, Miss
from kvss_agent.tier2.address import Scope, parse
from kvss_agent.tier2.backend import (
    Arriving,
    Failed,
    Fault,
    Found,
    Incoming,
    Leaving,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
)
from kvss_agent.tier2.column_file import PAGE
from kvss_agent.tier2.files import Staged, discard, link, unless_swept
from kvss_agent.tier2.files import files as system_files
from kvss_agent.tier2.index import Caps

TEMPORARY: Final = ".tmp-"
ABANDONED_SECONDS: Final = 3600.0  # where the mount has no locks, an unfinished file is as old as this
BOUNCE_BYTES: Final = 2 << 20  # one huge page
_ATTEMPTS: Final = 5  # against another agent that removes, or fills, the same directory
_NEW: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_NAMELESS: Final = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
# A name is another's to choose where a directory is shared: no link is followed, no pipe waited for.
_AS_IT_IS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_READ: Final = os.O_RDONLY | _AS_IT_IS
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | _AS_IT_IS
_HEX: Final = re.compile(r"[0-9a-f]{2}|[0-9a-f]{32}")
_NO_SUCH: Final = (errno.ENOENT, errno.ESTALE)  # ESTALE: another client of the share removed it
_SWEPT: Final = (FileNotFoundError, BlockingIOError)  # by another agent, before we had locked it
_NOT_NOW: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # such a disk is read, and emptied
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# No file without a name here, or none that gets one later: there may be no /proc, or no links.
_NO_NAMELESS: Final = (
    errno.EOPNOTSUPP,
    errno.EISDIR,
    errno.ENOENT,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.EACCES,
    errno.EXDEV,
)
_T = TypeVar("_T")
_FAULTS: Final = {
    errno.ENOSPC: Fault.NO_SPACE,
    errno.EDQUOT: Fault.NO_SPACE,
    errno.EFBIG: Fault.NO_SPACE,
    errno.EIO: Fault.IO_ERROR,
    errno.EACCES: Fault.DENIED,
    errno.EPERM: Fault.DENIED,
    errno.EROFS: Fault.DENIED,
    errno.ETIMEDOUT: Fault.UNREACHABLE,
    errno.EHOSTDOWN: Fault.UNREACHABLE,
    errno.ENOENT: Fault.VANISHED,
    errno.ESTALE: Fault.VANISHED,
}


def _failed(error: OSError) -> Failed:
    """What the kernel refuses is a fault with a name."""
    text = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    return Failed(_FAULTS.get(error.errno or 0, Fault.OTHER), text)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed(error) from error


class Posix:
    """See `Backend`. `durable`: a spill waits for the disk, and outlives a power cut."""

    kind = "posix"
    looks_together = False

    def __init__(self, root: Path, *, durable: bool = False, mover: Mover = PYTHON) -> None:
        self._root = root
        self._prefix = (
            f"{root}/"  # plain strings where each column passes: Path costs as much as a rename
        )
        self._durable = durable
        self.use_mover(mover)
        self._mark = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._direct = 0
        self._local = threading.local()
        self._locks = False
        self._new = _NEW  # how files are made
        self._is_probed = False
        self._strangers = 0
        self._swept = 0

    @property
    def moves_columns(self) -> bool:
        """More is done between writing and publishing what has to last."""
        return not self._durable

    def use_mover(self, mover: Mover) -> None:
        """Read and write files with the system calls of this mover from now on."""
        self._calls = system_files(mover)

    def open(self) -> None:
        with translated():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._probe_if_it_can()

    def properties(self) -> Mapping[str, bool | int]:
        return {
            "direct_io": bool(self._direct),
            "locks": self._locks,
            "nameless": self._new == _NAMELESS,
            "durable": self._durable,
            "unknown_files": self._strangers,
            "unfinished_files_removed": self._swept,
        }

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        answers: list[bool | Failed] = [False] * len(files)
        ready: dict[int, Staged] = {}
        new, locks = self._new, self._locks  # `tidy` may find meanwhile that more can be done
        for index, staged in enumerate(self._stage(files, new, locks=locks)):
            if isinstance(staged, OSError):
                answers[index] = _failed(staged)
            else:
                ready[index] = staged
        try:
            for index, (fd, unfinished, _) in [*ready.items()]:
                error = _dated(fd, files[index].modified)
                if self._durable:
                    error = error or _synced(fd)
                if error or not files[index].intact():
                    answers[index] = _failed(error) if error else False
                    discard(fd, unfinished)
                    del ready[index]
        except BaseException:
            for fd, unfinished, _ in ready.values():
                discard(fd, unfinished)
            raise
        published = self._calls.publish([*ready.values()], new, locks)
        for index, error in zip(ready, published, strict=True):
            if error is None and self._durable:
                error = _lasting(ready[index][2])
            answers[index] = _failed(error) if error else True
        return answers

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        wanted = [(f"{self._prefix}{name}", parts) for name, parts in files]
        answers: list[int | Failed | None] = []
        for got in self._calls.fetch(wanted, _READ | self._direct, self._bounce()):
            if isinstance(got, OSError):
                answers.append(None if got.errno in _NO_SUCH else _failed(got))
            else:
                answers.append(got)
        return answers

    def store_columns(self, columns: Sequence[Leaving]) -> list[Miss | Failed | None]:
        paths = [f"{self._prefix}{column.name}" for column in columns]
        victims = [one.victim and f"{self._prefix}{one.victim}" for one in columns]

        def put(some: Sequence[int], unfinished: Sequence[str]) -> Sequence[Miss | OSError | None]:
            wanted = [
                (temporary, paths[at], *columns[at][1:5], victims[at])
                for at, temporary in zip(some, unfinished, strict=True)
            ]
            return self._calls.store(wanted, self._new | self._direct, self._locks, self._bounce())

        answers = self._with_directories(paths, put)
        return [_failed(one) if isinstance(one, OSError) else one for one in answers]

    def load_columns(self, columns: Sequence[Arriving]) -> list[Header | Miss | Failed]:
        wanted = [(f"{self._prefix}{name}", slot, filed) for name, slot, filed in columns]
        answers: list[Header | Miss | Failed] = []
        for found in self._calls.load(wanted, _READ | self._direct, self._bounce()):
            if isinstance(found, OSError):
                answers.append(Miss.ABSENT if found.errno in _NO_SUCH else _failed(found))
            else:
                answers.append(found)
        return answers

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        with translated():
            return [_look(f"{self._prefix}{name}") for name in names]

    def delete(self, names: Sequence[str]) -> None:
        with translated():
            for name in names:
                _unlink(f"{self._prefix}{name}")

    def damaged(self, names: Sequence[str]) -> list[bool]:
        self.delete(names)
        return [False] * len(names)

    def hand_over(self, name: str, to: Posix) -> None:
        """The file goes to another directory of this disk, as it is."""
        path = f"{to._prefix}{name}"
        with translated():
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(f"{self._prefix}{name}", path)  # noqa: PTH104 - as everywhere here

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        self._strangers = 0
        with translated():
            folders = [
                f"{namespace}/{tag}/{folder}"
                for namespace in self._directories("")
                for tag in self._directories(namespace)
                for folder in self._directories(f"{namespace}/{tag}")
            ]
            for done, folder in enumerate(folders):
                progress(done, len(folders))
                yield from self._files(folder)
            progress(len(folders), len(folders))

    def purge(self, scope: Scope) -> Removed:
        columns = size = 0
        with translated():
            for _ in range(_ATTEMPTS):
                left = False
                for folder in self._folders_of(scope):
                    removed, is_gone = _remove_tree(self._root, folder)
                    columns += removed.columns
                    size += removed.bytes
                    left |= not is_gone
                if not left:
                    return Removed(columns, size)
        raise Failed(Fault.OTHER, "others keep writing what is being purged")

    def own_faults(self) -> Mapping[str, int]:
        return {}  # it does nothing by itself

    def set_caps(self, caps: Caps) -> None:
        """It has no copies."""

    def tidy(self) -> None:
        """Find out what can be done with files here, if there was no room for one at the start."""
        if not self._is_probed:
            self.open()

    def close(self) -> None:
        """It holds nothing open."""

    # Inside

    def _probe_if_it_can(self) -> None:
        """A disk that is full, or read-only, is used as one that can do least. Else it could not even be
        emptied."""
        for attempt in range(_ATTEMPTS):
            try:
                self._probe(self._temporary(str(self._root)))
            except _SWEPT:
                if attempt == _ATTEMPTS - 1:
                    raise
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    raise
                break
            else:
                self._is_probed = True
                break

    def _probe(self, path: str) -> None:
        """What can be done with a file here."""
        fd = os.open(path, _NEW, 0o600)
        try:
            self._locks = _lock(fd)
            unless_swept(fd, path)
            self._direct = os.O_DIRECT if _can_be_direct(path) else 0
        finally:
            discard(fd, path)
        self._new = _NAMELESS if _can_be_nameless(path) else _NEW

    def _bounce(self) -> memoryview | None:
        """This thread's huge page, if bytes bypass the page cache."""
        if not self._direct:
            return None
        if not hasattr(self._local, "bounce"):
            self._local.bounce = _huge_page()
        bounce: memoryview = self._local.bounce
        return bounce

    def _temporary(self, directory: str) -> str:
        return f"{directory}/{TEMPORARY}{self._mark}-{next(self._numbers)}"

    def _stage(self, files: Sequence[Outgoing], new: int, *, locks: bool) -> list[Staged | OSError]:
        """All written, under temporary names if they need any."""
        paths = [f"{self._prefix}{file.name}" for file in files]

        def stage(some: Sequence[int], unfinished: Sequence[str]) -> list[Staged | OSError]:
            wanted = [
                (temporary, files[at].parts) for at, temporary in zip(some, unfinished, strict=True)
            ]
            made = self._calls.stage(wanted, new | self._direct, locks, self._bounce())
            return [
                fd if isinstance(fd, OSError) else (fd, temporary, paths[at])
                for at, temporary, fd in zip(some, unfinished, made, strict=True)
            ]

        return self._with_directories(paths, stage)

    def _with_directories(
        self,
        paths: Sequence[str],
        put: Callable[[Sequence[int], Sequence[str]], Sequence[_T | OSError]],
    ) -> list[_T | OSError]:
        """Put files there by `put`, which is told which, and by what temporary names. Directories are
        made if need be; a purge may take them, and another agent a file that is not locked yet."""
        answers: list[_T | OSError] = [FileNotFoundError()] * len(paths)
        left = [*range(len(paths))]
        for _ in range(_ATTEMPTS):
            made = put(left, [self._temporary(paths[at].rpartition("/")[0]) for at in left])
            for at, answer in zip(left, made, strict=True):
                answers[at] = answer
            left = [at for at in left if _may_be_tried_again(answers[at], paths[at])]
            if not left:
                break
            for at in left:
                answers[at] = _make_directory_of(paths[at]) or answers[at]
        return answers

    def _directories(self, under: str) -> list[str]:
        """The names of directories that may be ours; what else lies there is counted and left alone."""
        names = []
        try:
            with os.scandir(self._root / under) as entries:
                for entry in entries:
                    if _HEX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        names.append(entry.name)
                    elif not self._is_swept(entry):
                        self._strangers += 1
        except FileNotFoundError:  # purged meanwhile
            return []
        return names

    def _files(self, folder: str) -> Iterator[Found]:
        try:
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    address = parse(f"{folder}/{entry.name}")
                    if address is None:
                        self._strangers += not self._is_swept(entry)
                        continue
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield Found(address, status.st_size, status.st_mtime)
        except FileNotFoundError:  # purged meanwhile
            return

    def _is_swept(self, entry: os.DirEntry[str]) -> bool:
        """Whether this is a temporary file, and away with it if its writer is dead."""
        if not entry.name.startswith(TEMPORARY):
            return False
        try:
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                return False
            if self._locks:
                self._sweep_if_left(entry.path)
            elif time.time() - status.st_mtime > ABANDONED_SECONDS:
                self._sweep(entry.path)
        except FileNotFoundError:
            pass
        except OSError:  # it stays, and the others are listed
            return False
        return True

    def _sweep_if_left(self, path: str) -> None:
        fd = os.open(path, os.O_WRONLY | _AS_IT_IS)
        try:
            with contextlib.suppress(BlockingIOError):
                _lock(fd)
                self._sweep(path)  # with the lock, so that a writer that comes late sees that it is gone
        finally:
            os.close(fd)

    def _sweep(self, path: str) -> None:
        os.unlink(path)  # noqa: PTH108
        self._swept += 1

    def _folders_of(self, scope: Scope) -> list[str]:
        """The directories that a purge has to remove, as far as they exist."""
        namespaces = [scope.namespace.hex()] if scope.namespace else self._directories("")
        folders = namespaces
        if scope.tag:
            folders = [f"{namespace}/{scope.tag.hex()}" for namespace in namespaces]
        return [folder for folder in folders if os.path.lexists(self._root / folder)]


def _can_be_direct(path: str) -> bool:
    """Whether a page goes to this file without the page cache: some open it so, and then refuse."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    try:
        os.pwritev(fd, [mmap.mmap(-1, PAGE)], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(fd)
    return True


def _can_be_nameless(path: str) -> bool:
    """Whether a file can be made without a name here, and get this one later."""
    fd = -1
    try:
        fd = os.open(path.rpartition("/")[0], _NAMELESS, 0o600)
        link(fd, path)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
        return False
    finally:
        if fd >= 0:
            discard(fd, path)
    return True


def _lock(fd: int) -> bool:
    """Take the file's lock; False if the mount has none. Raises BlockingIOError if somebody has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _huge_page() -> memoryview:
    """Adjacent memory, where the system has it to give."""
    memory = mmap.mmap(-1, 2 * BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % BOUNCE_BYTES
    page = memoryview(memory)[start : start + BOUNCE_BYTES]
    zero(page)
    return page


def _look(path: Path | str, folder: int | None = None) -> Seen | None:
    """`folder`: the descriptor of that in which the path is."""
    try:
        status = os.lstat(path, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_SUCH:
            return None
        raise
    return Seen(status.st_size, status.st_mtime)


def _unlink(path: Path | str, folder: int | None = None) -> None:
    try:
        os.unlink(path, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_SUCH:
            raise


def _may_be_tried_again(answer: object, path: str) -> bool:
    """Whether the temporary file could not be had. One that is gone when it is published is a fault."""
    return isinstance(answer, _SWEPT) and answer.filename != path


def _make_directory_of(path: str) -> OSError | None:
    """Why it cannot be made. That it is being removed at this moment is no reason."""
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _dated(fd: int, modified: float | None) -> OSError | None:
    """Why this file cannot say that it is as old as its original: then it would live too long."""
    if modified is not None:
        try:
            os.utime(fd, (modified, modified))
        except OSError as error:
            return error
    return None


def _synced(fd: int) -> OSError | None:
    """Why the disk does not have all of this file."""
    try:
        os.fsync(fd)
    except OSError as error:
        return error
    return None


def _lasting(path: str) -> OSError | None:
    """Why a power cut might take the name of this file away, and then it is gone at once."""
    try:
        sync_directory(path.rpartition("/")[0])
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
        return error
    return None


def _remove_tree(root: Path, folder: str) -> tuple[Removed, bool]:
    """Remove a directory with all that is in it, its empty parents too, and make that last.

    What was removed, and whether the directory is gone: another agent may put a file into it.
    """
    columns = size = 0
    top = root / folder
    with contextlib.ExitStack() as opened:
        parent = _parent(root, folder, opened)
        walk = os.fwalk(top.name, topdown=False, onerror=_unless_gone, dir_fd=parent)
        for place, folders, files, fd in walk if parent is not None else ():
            directory = f"{folder.rpartition('/')[0]}/{place}".lstrip("/")
            for name in files:
                seen = _look(name, fd)
                size += seen.bytes if seen else 0
                columns += parse(f"{directory}/{name}") is not None
                _unlink(name, fd)
            for name in folders:
                if not _unlink_if_no_folder(name, fd):
                    _rmdir(name, fd)
        if parent is not None:
            _unlink_if_no_folder(top.name, parent)
    survivor = top
    while survivor != root and _rmdir(survivor):
        survivor = survivor.parent
    sync_directory(survivor)
    return Removed(columns, size), not os.path.lexists(top)


def _parent(root: Path, folder: str, opened: contextlib.ExitStack) -> int | None:
    """Open the directory in which this one is; None if there is none. A link that another agent has put
    in its place goes: nothing behind it is ours."""
    parent = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    opened.callback(os.close, parent)
    for name in folder.split("/")[:-1]:
        try:
            inner = os.open(name, _FOLDER, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                _unlink(name, parent)
            elif error.errno not in _NO_SUCH:
                raise
            return None
        opened.callback(os.close, inner)
        parent = inner
    return parent


def _unlink_if_no_folder(name: str, folder: int) -> bool:
    """Whether it was no directory of this folder: it is gone then."""
    try:
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            return False
    except OSError as error:
        _unless_gone(error)
        return True
    _unlink(name, folder)
    return True


def _unless_gone(error: OSError) -> None:
    if error.errno not in _NO_SUCH:
        raise error


def _rmdir(path: Path | str, folder: int | None = None) -> bool:
    """Whether the directory is gone. It stays if something is in it."""
    try:
        os.rmdir(path, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_SUCH:
            return True
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
