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
# As in interposer.c.
_ACTIVE: Final = struct.Struct("@I")
_RULE: Final = struct.Struct("@I476s64x")
_FAULT: Final = struct.Struct("@IiIqII")
_FAULTS_AT: Final = _RULE.size - 2 * _FAULT.size
SOURCE: Final = Path(__file__).with_name("interposer.c")
MNT_DETACH: Final = 2
MS_REMOUNT, MS_RDONLY = 32, 1


@dataclass
class Disk:
    """All files below one directory."""

    path: Path
    _rules: memoryview = field(repr=False)
    _start: int  # of its rule
    _active: int = 0  # which of the rule's two faults, from 1

    def __post_init__(self) -> None:
        _RULE.pack_into(self._rules, self._start, 0, bytes(self.path))

    def heal(self) -> None:
        """All is well from now on, and what hangs goes on."""
        self._activate(0)

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
        if not self._active:
            return 0
        found: int = _FAULT.unpack_from(self._rules, self._at(self._active))[-1]
        return found

    def _fault(
        self, calls: int, error: int = 0, one_in: int = 1, flip_at: int = -1, *, hangs: bool = False
    ) -> None:
        """In place of the present fault, if there is one: no call between the two is well."""
        free = 2 if self._active == 1 else 1
        self._write(self._at(free), _FAULT.pack(calls, error, one_in, flip_at, hangs, 0))
        self._activate(free)

    def _at(self, fault: int) -> int:
        return self._start + _FAULTS_AT + (fault - 1) * _FAULT.size

    def _activate(self, fault: int) -> None:
        self._active = fault
        self._write(self._start, _ACTIVE.pack(fault))

    def _write(self, start: int, its: bytes) -> None:
        """Not by `pack_into`, which writes zeros first: a call that looks just then would be well."""
        self._rules[start : start + len(its)] = its


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
        assert len(self._disks) < RULES
        made = Disk(path, self._rules, len(self._disks) * _RULE.size)
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
