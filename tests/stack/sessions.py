"""Which processes run, for tests that want to see nothing left."""

from __future__ import annotations

import os

import psutil


def members(first: int) -> list[int]:
    """What runs in the session that process `first` began."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == first and is_running(pid):
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def is_running(pid: int) -> bool:
    """Whether it exists and is not just waiting to be buried by its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
