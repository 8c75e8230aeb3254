"""Disks that fail while a real agent uses them: see `interposer.c`.

An agent that is started with `Disks.environment` asks the C library through the interposer, and a test
says what becomes of its calls. Where the machine lets root mount, `small_disk` is a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

READ, WRITE, CREATE, REMOVE, SYNC, LOOK = (1 << place for place in range(6))
READS: Final = READ | LOOK
CHANGES: Final = WRITE | CREATE | REMOVE | SYNC
ALL: Final = READS | CHANGES
RULES: Final = 8
_RULE: Final = struct.Struct("@IIiIqII480s")  # as in interposer.c
_MET: Final = struct.Struct("@I")
_MET_AT: Final = 28
SOURCE: Final = Path(__file__).with_name("interposer.c")
MNT_DETACH: Final = 2
MS_REMOUNT, MS_RDONLY = 32, 1


@dataclass
class Disk:
    """All files below one directory."""

    path: Path
    _rules: memoryview = field(repr=False)
    _place: int

    def heal(self) -> None:
        """All is well from now on, and what hangs goes on."""
        self._set(0, b"\0" * _RULE.size)

    def fail(self, calls: int, error: int, one_in: int = 1) -> None:
        """Calls of these kinds fail; those for one name in so many, and the others are well."""
        self._fault(calls, error=error, one_in=one_in)

    def be_read_only(self) -> None:
        self.fail(CHANGES, errno.EROFS)

    def be_full(self) -> None:
        self.fail(WRITE | CREATE, errno.ENOSPC)

    def hang(self, calls: int = ALL) -> None:
        """Calls take until the disk heals."""
        self._fault(calls, hangs=True)

    def flip(self, at: int, one_in: int = 1) -> None:
        """This byte of a file is read with one bit changed, without an error."""
        self._fault(READ, flip_at=at, one_in=one_in)

    @property
    def met(self) -> int:
        """Calls that the present fault has met."""
        found: int = _MET.unpack_from(self._rules, self._place * _RULE.size + _MET_AT)[0]
        return found

    def _fault(
        self, calls: int, error: int = 0, one_in: int = 1, flip_at: int = -1, *, hangs: bool = False
    ) -> None:
        self.heal()
        below = bytes(self.path)
        self._set(4, _RULE.pack(0, calls, error, one_in, flip_at, hangs, 0, below)[4:])
        self._set(0, _MET.pack(1))  # last: from here on it holds

    def _set(self, at: int, content: bytes) -> None:
        start = self._place * _RULE.size + at
        self._rules[start : start + len(content)] = content


class Disks:
    """Those of one test, and what agents need to be started with."""

    def __init__(self, library: Path, control: Path) -> None:
        control.write_bytes(b"\0" * RULES * _RULE.size)
        with control.open("r+b") as file:
            self._rules = memoryview(mmap.mmap(file.fileno(), 0))
        self._disks: list[Disk] = []
        # Only a process that is started anew is asked what to load.
        self.more: dict[str, Any] = {
            "environment": {"LD_PRELOAD": str(library), "DISK_FAULTS": str(control)},
            "is_fresh": True,
        }

    def at(self, path: Path) -> Disk:
        made = Disk(path, self._rules, len(self._disks))
        assert made._place < RULES
        self._disks.append(made)
        return made

    def heal(self) -> None:
        for one in self._disks:
            one.heal()


def compiled(folder: Path) -> Path:
    """The interposer; skips the test where it can't be made."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler: disks can't be made to fail")
    library = folder / "interposer.so"
    made = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"the interposer can't be compiled here: {made.stderr[:500]}")
    return library


@dataclass
class SmallDisk:
    """A file system of its own, with room for so many bytes."""

    path: Path

    def remount(self, *, read_only: bool) -> None:
        flags = MS_REMOUNT | (MS_RDONLY if read_only else 0)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tmpfs", bytes(self.path), b"tmpfs", flags, None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """Skips the test where it can't be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, f"size={size},mode=700".encode()):
        pytest.skip(f"root may not mount here: {os.strerror(ctypes.get_errno())}")
    try:
        yield SmallDisk(path)
    finally:
        assert libc.umount2(bytes(path), MNT_DETACH) == 0
