"""Waiting until something in a folder changes, without looking all the time.

With inotify where the kernel has a watch left for this user; else it is looked at every so often.
"""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path
from typing import Final, Self

_IN_CLOSE_WRITE: Final = 0x8
_IN_MOVED_TO: Final = 0x80
_BUFFER_BYTES: Final = 64 << 10


class FolderWatch:
    """Files that are written or moved to the folder, from here on. All but `wake` is for one thread."""

    def __init__(self, folder: Path, look_seconds: float) -> None:
        """`look_seconds`: how often the folder has to be looked at where it can't be watched."""
        self._look_seconds = look_seconds
        self._file: int | None = _watching(folder)
        self._poll = select.poll()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._woken, select.POLLIN)
        if self._file is not None:
            self._poll.register(self._file, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._woken)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def wake(self) -> None:
        """`wait` returns, now and from here on. Before `close`."""
        os.eventfd_write(self._woken, 1)

    @property
    def descriptor(self) -> int | None:
        """What can be read once something has changed; None where nothing is watched."""
        return self._file

    def wait(self, seconds: float) -> None:
        """Until something has changed, at most so long. It may return though nothing has."""
        if self._file is None:
            seconds = min(seconds, self._look_seconds)
        if self._poll.poll(seconds * 1000):
            self.clear()

    def clear(self) -> None:
        """Forget what has changed so far. Does not wait."""
        try:
            if self._file is not None:
                os.read(self._file, _BUFFER_BYTES)
        except BlockingIOError:
            pass


def _watching(folder: Path) -> int | None:
    """None where there is no inotify, or no watch is left."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "inotify_init1"):
        return None
    file = int(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if file < 0:
        return None
    if library.inotify_add_watch(file, os.fsencode(folder), _IN_CLOSE_WRITE | _IN_MOVED_TO) < 0:
        os.close(file)
        return None
    return file
