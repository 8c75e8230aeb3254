"""Taking memory back that a refill may still write to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

GRACE_SECONDS: Final = 0.1  # for payloads that are arriving, before their connection is ended


class Withdrawal:
    """Of the memory of one refill. Once `withdraw` has returned nothing is written there any more: an
    answer that comes later is received and dropped.

    Payloads that are arriving may take as long as the grace time. If they take longer, the connection
    ends: between frames is the only place where it could go on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_withdrawn = False
        self._end: Callable[[], None] | None = None  # the connection; while payloads arrive

    def withdraw(self) -> None:
        with self._changed:
            self._is_withdrawn = True
            if self._changed.wait_for(lambda: self._end is None, GRACE_SECONDS):
                return
            end = self._end
        if end:
            end()
        with self._changed:
            self._changed.wait_for(lambda: self._end is None)

    @contextlib.contextmanager
    def receiving(self, end: Callable[[], None]) -> Iterator[bool]:
        """Whether payloads may be written to the memory, as long as this lasts. `end` ends their
        connection."""
        with self._changed:
            may = not self._is_withdrawn
            if may:
                self._end = end
        try:
            yield may
        finally:
            with self._changed:
                self._end = None
                self._changed.notify_all()
