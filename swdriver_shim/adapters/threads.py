"""Threads for the work of an engine's steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def start_pool(count: int, name: str) -> ThreadPoolExecutor:
    """Start a pool with all of its threads.

    A pool of Python's starts them when there is work. Where the system has no thread left by then, it
    raises into the step of an engine, and does the work at some later time, when the blocks are others'.
    Raises RuntimeError where it has none now.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    started = threading.Barrier(count)  # or one that has nothing to do would be taken for the next one
    try:
        for _ in range(count):
            pool.submit(started.wait)
    except BaseException:  # else those that were started would wait for ever, and the process with them
        started.abort()
        pool.shutdown()
        raise
    return pool
