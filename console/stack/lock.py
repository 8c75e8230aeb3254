"""One owner at a time for a state directory.

The kernel drops an flock when its holder dies, however it dies, so there is no stale lock to reason
about. What the file says about the holder is for people; only the lock itself decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from console.stack.errors import sentences

FILE_NAME = "lock"


class HeldError(Exception):
    """Somebody else holds the lock; `holder` is what they wrote about themselves."""

    def __init__(self, holder: dict[str, Any]) -> None:
        super().__init__(f"held by process {holder.get('pid', 'unknown')}")
        self.holder = holder


class Held:
    """The lock while we hold it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._about: dict[str, Any] = {}

    def describe(self, **about: Any) -> None:
        """Add to what others read about us. In place, for a rename would lose the lock."""
        self._about.update(about)
        text = json.dumps(self._about).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))


@contextlib.contextmanager
def held(directory: Path) -> Iterator[Held]:
    """Hold the lock of `directory`, or raise HeldError at once."""
    path = directory / FILE_NAME
    with sentences("take the lock", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HeldError(_read(descriptor)) from error
        with sentences("take the lock", path):
            lock = Held(descriptor)
            lock.describe(pid=os.getpid(), since=time.time())
        yield lock
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def holder(directory: Path) -> dict[str, Any] | None:
    """What the present holder says about itself, or None if nobody holds the lock."""
    path = directory / FILE_NAME
    with sentences("read who holds the lock", path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    finally:
        os.close(descriptor)
    return None


def _read(descriptor: int) -> dict[str, Any]:
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:  # its holder is only just writing it
        return {}
    return about if isinstance(about, dict) else {}
