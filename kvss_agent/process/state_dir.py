"""The state directory of a process: one process at a time uses it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Final

LOCK_SECONDS: Final = 10.0  # for a process that is about to end


def locked(state_dir: Path) -> IO[bytes]:
    """A file that holds the state directory for this process while it is open: two processes with one
    identity would be in each other's way. A process that is ending is waited for. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.fdopen(os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb")
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(LOCK_SECONDS / 100)
                continue
            file.close()
            raise OSError(f"another process uses the state directory {state_dir}") from None
        return file
