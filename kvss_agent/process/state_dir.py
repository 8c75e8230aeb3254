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
    until = time.monotonic() + LOCK_SECONDS
    while (file := try_lock(state_dir)) is None:
        if time.monotonic() >= until:
            raise OSError(f"another process uses the state directory {state_dir}")
        time.sleep(LOCK_SECONDS / 100)
    return file


def try_lock(state_dir: Path) -> IO[bytes] | None:
    """The same at once; None while another process holds it. The kernel frees it when its process is
    gone, whatever that died of. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.fdopen(os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file
