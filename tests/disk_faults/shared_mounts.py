"""A directory that several clients mount: a FUSE file system, by the kernel's own protocol.

Each mount is a client of its own, as an NFS client or 3FS on a node: what it knows of names and sizes it
may believe for `CACHED_SECONDS`, whatever others do meanwhile; locks hold among all clients; a file has
a name from the start. Where root may not mount, tests that ask for one are skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.disk_faults.disks import MNT_DETACH

CACHED_SECONDS: Final = 1
MINOR: Final = 31  # of version 7: what was added later is not offered
WRITE_BYTES: Final = 128 << 10  # at once
ROOM: Final = WRITE_BYTES + 4096
ROOT: Final = 1
BIG_WRITES, FLOCK_LOCKS = 1 << 5, 1 << 10
SIZE, ACCESSED, MODIFIED = 1 << 3, 1 << 4, 1 << 5  # what is to be set
CLOSING: Final = (18, 29)  # a file, a directory
_HEAD: Final = struct.Struct("<IIQQ16x")
_ANSWER: Final = struct.Struct("<IiQ")
_ATTRIBUTES: Final = struct.Struct("<6Q10I")
_DIRENT: Final = struct.Struct("<QQII")
_SETATTR: Final = struct.Struct("<II6Q3I")
_READ: Final = struct.Struct("<QQI")


@dataclass
class Client:
    """Answers what the kernel asks of one mount, by calls on the directory behind."""

    path: Path  # where it is mounted
    device: int
    root: int
    fault: int = 0  # the error of every call, as of a mount whose server is away
    nodes: dict[int, int] = field(default_factory=dict)  # O_PATH descriptors, by the number of a node
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # by device and inode
    listed: dict[int, list[os.DirEntry[str]]] = field(default_factory=dict)  # by open directory

    def __post_init__(self) -> None:
        self.nodes[ROOT] = self.root
        self._calls: dict[int, Callable[[int, bytes], bytes | None]] = {
            1: lambda node, its: self._entry(node, _name(its)),
            3: lambda node, _: self._attributes(node),
            4: self._set_attributes,
            9: self._make_directory,
            10: lambda node, its: os.unlink(_name(its), dir_fd=self.nodes[node]),
            11: lambda node, its: os.rmdir(_name(its), dir_fd=self.nodes[node]),
            12: lambda node, its: self._rename(node, its, skipped=8),
            13: self._link,
            14: lambda node, its: struct.pack("<QII", self._open(node, _number(its)), 0, 0),
            15: self._read,
            16: self._write,
            17: lambda node, _: self._file_system(node),
            18: lambda _, its: os.close(_handle(its)),
            20: lambda _, its: os.fsync(_handle(its)),
            25: lambda *_: b"",  # a descriptor was closed; others may be open
            26: self._begin,
            27: self._open_directory,
            28: self._list,
            29: self._close_directory,
            30: lambda _, its: os.fsync(_handle(its)),
            32: self._lock,
            35: self._create,
            45: lambda node, its: self._rename(node, its, skipped=16),
        }

    def serve(self) -> None:
        """Until it is unmounted."""
        while True:
            try:
                asked = os.read(self.device, ROOM)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return
            _, call, unique, node = _HEAD.unpack_from(asked)
            if call in (2, 36, 42):  # forget one, interrupt, forget several: nobody waits for an answer
                continue
            answer: bytes | None = None
            fault = 0 if call in CLOSING else self.fault
            try:
                answer = None if fault else self._calls[call](node, asked[40:])
            except KeyError:
                fault = errno.ENOSYS
            except OSError as error:
                fault = error.errno or errno.EIO
            answer = answer or b""
            with contextlib.suppress(OSError):  # whoever asked has been killed
                os.writev(self.device, [_ANSWER.pack(16 + len(answer), -fault, unique), answer])

    def close(self) -> None:
        for descriptor in self.nodes.values():
            os.close(descriptor)

    # What it is asked

    def _begin(self, _: int, its: bytes) -> bytes:
        _, _, read_ahead, offered = struct.unpack_from("<4I", its)
        flags = offered & (BIG_WRITES | FLOCK_LOCKS)
        return struct.pack("<4IHHII36x", 7, MINOR, read_ahead, flags, 16, 12, WRITE_BYTES, 1)

    def _entry(self, parent: int, name: str) -> bytes:
        try:
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.nodes[parent])
        except FileNotFoundError:
            return struct.pack("<4Q2I88x", 0, 0, CACHED_SECONDS, 0, 0, 0)  # that there is none is cached
        status = os.fstat(found)
        number = self.numbers.setdefault((status.st_dev, status.st_ino), found + ROOT)
        if number - ROOT != found:
            os.close(found)
        self.nodes[number] = number - ROOT
        told = struct.pack("<4Q2I", number, 0, CACHED_SECONDS, CACHED_SECONDS, 0, 0)
        return told + _attributes(status)

    def _attributes(self, node: int) -> bytes:
        return struct.pack("<QII", CACHED_SECONDS, 0, 0) + _attributes(os.fstat(self.nodes[node]))

    def _set_attributes(self, node: int, its: bytes) -> bytes:
        what, _, _, size, _, *times = _SETATTR.unpack_from(its)
        path = self._path(node)
        if what & SIZE:
            os.truncate(path, size)
        if what & (ACCESSED | MODIFIED):
            now = os.fstat(self.nodes[node])
            accessed = times[0] * 10**9 + times[3] if what & ACCESSED else now.st_atime_ns
            modified = times[1] * 10**9 + times[4] if what & MODIFIED else now.st_mtime_ns
            os.utime(path, ns=(accessed, modified))
        return self._attributes(node)

    def _make_directory(self, node: int, its: bytes) -> bytes:
        os.mkdir(_name(its[8:]), _number(its), dir_fd=self.nodes[node])
        return self._entry(node, _name(its[8:]))

    def _rename(self, node: int, its: bytes, skipped: int) -> None:
        source, target = its[skipped:].split(b"\0")[:2]
        into = self.nodes[_handle(its)]
        os.rename(source.decode(), target.decode(), src_dir_fd=self.nodes[node], dst_dir_fd=into)

    def _link(self, node: int, its: bytes) -> bytes:
        os.link(self._path(_handle(its)), _name(its[8:]), dst_dir_fd=self.nodes[node])
        return self._entry(node, _name(its[8:]))

    def _open(self, node: int, flags: int) -> int:
        return os.open(self._path(node), flags & ~(os.O_NOFOLLOW | os.O_DIRECT))

    def _create(self, node: int, its: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", its)
        name = _name(its[16:])
        made = os.open(name, flags & ~os.O_DIRECT, mode, dir_fd=self.nodes[node])
        return self._entry(node, name) + struct.pack("<QII", made, 0, 0)

    def _read(self, _: int, its: bytes) -> bytes:
        handle, offset, size = _READ.unpack_from(its)
        return os.pread(handle, size, offset)

    def _write(self, _: int, its: bytes) -> bytes:
        handle, offset, size = _READ.unpack_from(its)
        return struct.pack("<II", os.pwrite(handle, its[40 : 40 + size], offset), 0)

    def _file_system(self, node: int) -> bytes:
        its = os.statvfs(self._path(node))
        room = (its.f_blocks, its.f_bfree, its.f_bavail, its.f_files, its.f_ffree)
        return struct.pack("<5Q3I28x", *room, its.f_bsize, 255, its.f_frsize)

    def _open_directory(self, node: int, _: bytes) -> bytes:
        handle = self._open(node, os.O_RDONLY | os.O_DIRECTORY)
        with os.scandir(handle) as entries:
            self.listed[handle] = [*entries]
        return struct.pack("<QII", handle, 0, 0)

    def _close_directory(self, _: int, its: bytes) -> None:
        del self.listed[_handle(its)]
        os.close(_handle(its))

    def _list(self, _: int, its: bytes) -> bytes:
        handle, offset, size = _READ.unpack_from(its)
        told = b""
        for at, one in enumerate(self.listed[handle][offset:], offset + 1):
            name = one.name.encode()
            kind = 4 if one.is_dir(follow_symlinks=False) else 8
            entry = _DIRENT.pack(one.inode(), at, len(name), kind) + name
            entry += b"\0" * (-len(entry) % 8)
            if len(told) + len(entry) > size:
                break
            told += entry
        return told

    def _lock(self, _: int, its: bytes) -> bytes:
        handle, _, _, _, kind = struct.unpack_from("<4QI", its)
        how = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}.get(kind, fcntl.LOCK_UN)
        fcntl.flock(handle, how | fcntl.LOCK_NB)
        return b""

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self.nodes[node]}"


def _attributes(its: os.stat_result) -> bytes:
    seconds = [int(at // 10**9) for at in (its.st_atime_ns, its.st_mtime_ns, its.st_ctime_ns)]
    parts = [int(at % 10**9) for at in (its.st_atime_ns, its.st_mtime_ns, its.st_ctime_ns)]
    owner = (its.st_mode, its.st_nlink, its.st_uid, its.st_gid, 0, its.st_blksize, 0)
    return _ATTRIBUTES.pack(its.st_ino, its.st_size, its.st_blocks, *seconds, *parts, *owner)


def _name(its: bytes) -> str:
    return its[: its.index(b"\0")].decode()


def _number(its: bytes) -> int:
    return int.from_bytes(its[:4], "little")


def _handle(its: bytes) -> int:
    return int.from_bytes(its[:8], "little")


@contextlib.contextmanager
def mounted(behind: Path, at: Path) -> Iterator[Client]:
    """The directory behind, as one more client has it. Skips the test where it can't be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a shared directory")
    behind.mkdir(exist_ok=True)
    at.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"there is no FUSE here: {error.strerror}")
    client = Client(at, device, os.open(behind, os.O_PATH))
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if libc.mount(b"shared", bytes(at), b"fuse", 0, options.encode()):
        os.close(device)
        client.close()
        pytest.skip(f"root may not mount here: {os.strerror(ctypes.get_errno())}")
    thread = threading.Thread(target=client.serve, daemon=True)
    thread.start()
    try:
        yield client
    finally:
        assert libc.umount2(bytes(at), MNT_DETACH) == 0
        os.close(device)
        thread.join(10)
        client.close()
