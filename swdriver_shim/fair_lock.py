"""A lock that comes to who waits for it before who has had it has it again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class FairLock:
    """`with` it; a thread that has it must not take it again. A thread that does long work in pieces
    holds up nobody for more than a piece, and gets on however many requests there are. A
    `threading.Lock` is mostly taken again by who has just let it go, before who waits for it has woken.

    It is released also where the handler of a signal raises while it is taken or released, as vLLM's
    handlers do to stop an engine.
    """

    __slots__ = ("__exit__", "_held", "_next")
    __exit__: Callable[..., None]

    def __init__(self) -> None:
        self._held = threading.RLock()  # only who has it can release it
        self._next = threading.Lock()  # of who waits for `_held`, for whom those wait who come later
        self.__exit__ = self._held.__exit__  # compiled: no handler runs before it is released

    def __enter__(self) -> None:
        try:
            with self._next:
                self._held.acquire()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # if it was not taken yet
                self._held.release()
            raise
