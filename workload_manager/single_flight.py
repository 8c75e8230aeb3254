"""Work that one process of a machine does, while others wait for its result."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 0.05  # at whether another process is done


class Cancelled(Exception):
    """Nobody wants it any more."""


@contextlib.contextmanager
def alone(
    lock: Path,
    is_cancelled: Callable[[], bool] = lambda: False,
    waiting: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Hold a lock file of this machine; a process that is killed lets go of it. `waiting` is called
    while another one holds it. Raises Cancelled and OSError."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _taken(descriptor):
            if is_cancelled():
                raise Cancelled
            waiting()
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
