"""Whose requests and bodies the event loop has time for, so that nobody holds up the others at it.

To receive, decrypt, carry out and answer takes the time of one interpreter. An owner that is alone has
all of it. Beside others that ask, it has a fifth, over all its connections, and a little in advance:
what that does not suffice for waits, and who asks less waits for nothing. Bodies that nobody wants have
a small part at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SHARE: Final = 0.2  # of the time, for one owner beside others
# About what they take on a slow machine. Nobody can measure it for one of them: most of it is asyncio's.
REQUEST_SECONDS: Final = 0.001  # at most; short ones take a tenth to a third of it
BYTE_SECONDS: Final = 1 / (128 << 20)
MEASURED_REQUESTS: Final = 64  # after so many it is known what they have taken, all of them together
ADVANCE_SECONDS: Final = 0.05  # of waiting that an owner is spared: a request is often followed by more
UNWANTED_BYTES_PER_SECOND: Final = 8 << 20  # of all bodies whose requests are answered already
ASKS_SECONDS: Final = 0.25  # for so long after a request its owner counts as one that asks


class Pace:
    """Of one server. Times are of `time.monotonic`. Any thread may say that somebody asks."""

    def __init__(self, spent: Callable[[], float] = time.process_time) -> None:
        """`spent`: the processor time of the process so far. Other threads carry requests out, too."""
        self._spent = spent
        self._spent_before = 0.0
        self._requests = 0  # since then
        self._owners: set[str] = set()  # of these
        self._request_seconds = REQUEST_SECONDS
        self._asked_at: dict[str, float] = {}
        self._paid_until: dict[str, float] = {}  # by owner; none that has paid and is silent
        self._unwanted_until = 0.0

    def asks(self, owner: str, now: float) -> None:
        """This owner has sent a request."""
        self._asked_at[owner] = now

    def begins(self, owner: str, now: float) -> float:
        """A request of it is to be carried out: for how many seconds it has to wait before. Only the
        event loop's thread may ask."""
        if self._requests == MEASURED_REQUESTS:
            self._measure()
        self._requests += 1
        self._owners.add(owner)
        owed = max(0.0, self._paid_until.get(owner, now) - now - ADVANCE_SECONDS)
        return min(owed, self._spends(owner, self._request_seconds, now))

    def _measure(self) -> None:
        """What requests have taken, none knows of which. So each counts as if those of one owner had
        taken all of it: an owner that has to wait has sent as many of them as any other, or more."""
        spent = self._spent()
        most = (spent - self._spent_before) / (self._requests / len(self._owners))
        self._request_seconds = min(REQUEST_SECONDS, most)
        self._spent_before, self._requests = spent, 0
        self._owners.clear()

    def moved(self, owner: str, size: int, now: float) -> float:
        """So many bytes of its bodies were moved, or are to be: for how many seconds to wait then."""
        return self._spends(owner, size * BYTE_SECONDS, now)

    def unwanted(self, size: int, now: float) -> float:
        """So many bytes have come that nobody wants: for how many seconds to read no more of them."""
        self._unwanted_until = max(self._unwanted_until, now) + size / UNWANTED_BYTES_PER_SECOND
        return self._unwanted_until - now

    def _spends(self, owner: str, seconds: float, now: float) -> float:
        """How long until its share has paid for it, with all before, but for the advance."""
        if not self._is_beside_others(owner, now):
            self._paid_until.pop(owner, None)
            return 0.0
        self._paid_until[owner] = max(self._paid_until.get(owner, now), now) + seconds / SHARE
        return max(0.0, self._paid_until[owner] - now - ADVANCE_SECONDS)

    def _is_beside_others(self, owner: str, now: float) -> bool:
        if not self._asked_at or (len(self._asked_at) == 1 and owner in self._asked_at):
            return False
        silent = [one for one, at in list(self._asked_at.items()) if at < now - ASKS_SECONDS]
        for one in silent:
            self._asked_at.pop(one, None)
        if silent:
            self._paid_until = {one: until for one, until in self._paid_until.items() if until > now}
        return len(self._asked_at) > (owner in self._asked_at)
