"""A lock that comes to who waits for it before who has had it has it again."""

from __future__ import annotations

import threading


class FairLock:
    """`with` it. A thread that does long work in pieces holds up nobody for more than a piece, and gets
    on however many requests there are. A `threading.Lock` is mostly taken again by who has just let it
    go, before who waits for it has woken."""

    __slots__ = ("_held", "_next")

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._next = threading.Lock()  # of who waits for `_held`, for whom those wait who come later

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()
