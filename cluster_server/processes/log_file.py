"""The log of an instance or job: bounded, and followed while it grows.

Its process appends to one file, which nobody can take from it: what is older is copied to `log.1`,
and the file is cut to nothing. What is written between the last look at its length and the cut is
lost: that is microseconds, once in megabytes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO, Final, cast

BYTES_MAX: Final = 16 << 20  # of both files
CHUNK_BYTES: Final = 64 << 10
TAIL_BYTES_MAX: Final = 4 << 20
LINES_MAX: Final = 100_000
FOLLOW_SECONDS: Final = 0.2
PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LogFile:
    """Places in it are counted from where `log.1` began when this object was made."""

    def __init__(self, path: Path, bytes_max: int = BYTES_MAX) -> None:
        self._path = path
        self._former = path.with_name(f"{path.name}.1")
        self._half = bytes_max // 2
        self._lock = threading.Lock()
        self._begin = _size(self._former)  # of the file that is appended to

    def rotate(self) -> None:
        """Make room, if it is time. Of a flood the last part is kept. Raises OSError."""
        if _size(self._path) <= self._half:
            return
        with self._lock, _opened(self._path, "r+b") as file, _opened(self._former, "wb") as former:
            os.fchmod(former.fileno(), 0o600)
            copied = max(os.fstat(file.fileno()).st_size - self._half, 0)
            file.seek(copied)
            while piece := file.read(CHUNK_BYTES):
                former.write(piece)
                copied += len(piece)
            os.ftruncate(file.fileno(), 0)
            self._begin += copied

    def read(self, place: int) -> tuple[bytes, int]:
        """A piece from there on, and the place behind it. What is not kept any more is left out."""
        with self._lock:
            kept = _size(self._former)
            place = max(place, self._begin - kept)
            if place < self._begin:
                piece = _piece(self._former, place - (self._begin - kept), self._begin - place)
            else:
                piece = _piece(self._path, place - self._begin, CHUNK_BYTES)
        return piece, place + len(piece)

    def place_of_tail(self, lines: int) -> int:
        """Where the last so many lines begin; a line that is not ended counts."""
        with self._lock:
            end = self._begin + _size(self._path)
            first = max(self._begin - _size(self._former), end - TAIL_BYTES_MAX)
        place, found = first, bytearray()
        while place < end:
            piece, after = self.read(place)
            if not piece:
                break
            found += piece
            place = after
        text = bytes(found)
        at = len(text) - 1 if text.endswith(b"\n") else len(text)
        for _ in range(min(lines, LINES_MAX)):
            at = text.rfind(b"\n", 0, at)
            if at < 0:
                return first
        return first + at + 1

    async def stream(
        self, tail_lines: int, *, follow: bool, has_ended: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """All of it, or the last lines. With `follow` also what comes, until its process has ended and
        all was read."""
        place = await asyncio.to_thread(self.place_of_tail, tail_lines) if tail_lines else 0
        while True:
            is_last = has_ended()  # looked at before what it may have written last is read
            piece, place = await asyncio.to_thread(self.read, place)
            if piece:
                yield piece
            elif is_last or not follow:
                return
            else:
                await asyncio.sleep(FOLLOW_SECONDS)


def last_line(path: Path) -> str:
    """The last line that says something; empty if there is none."""
    end = _size(path)
    lines = _piece(path, max(end - 4096, 0), 4096).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _piece(path: Path, at: int, most: int) -> bytes:
    if not _size(path):
        return b""  # nothing yet, or no plain file
    try:
        with _opened(path, "rb") as file:
            file.seek(at)
            return file.read(min(most, CHUNK_BYTES))
    except FileNotFoundError:
        return b""


def _opened(path: Path, mode: str) -> BinaryIO:
    """A plain file, and no other: its process could leave something here that leads elsewhere, or that
    nobody ever comes back from who opens it. Raises OSError."""

    def open_plain(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | PLAIN, 0o600)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is no plain file", name)

    return cast("BinaryIO", open(path, mode, opener=open_plain))
