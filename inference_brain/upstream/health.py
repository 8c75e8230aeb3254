"""Whether a replica gets requests: outlier ejection and slow start. Pure.

A replica that cannot be reached is left out at once, and probed until it answers. One that fails several
times in a row is left out for a while, longer each time. Whoever returns, and whoever is new beside
others, begins slowly: with one request at a time, twice as many each second.

A request may be such that every engine fails at it. So one org's failures count once in a row while
another org is served, unless they are proven: the same request was answered elsewhere.

It may be such that engines fail at it by chance. So where several orgs send requests, what a replica
refuses one of them is told from what it refuses one after the other.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

FAILURES_MAX: Final = 3  # in a row
EJECTED_SECONDS: Final = 1.0  # the first time; then twice as long each time, up to
EJECTED_SECONDS_MAX: Final = 60.0
SLOW_START_SECONDS: Final = 10.0
FORGOTTEN_SECONDS: Final = 300.0  # without a failure: the next ejection is short again
SERVED_SECONDS: Final = 10.0  # since an answer: so long does it speak for the replica


class State(StrEnum):
    """As `brain_replica_state` has it."""

    READY = "ready"
    SLOW_START = "slow_start"
    EJECTED = "ejected"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"
    NO_ENDPOINT = "no_endpoint"  # nobody has said where it is


class LastOrgs:
    """The last two orgs that something was done for, and when."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = [("", -math.inf), ("", -math.inf)]

    @property
    def last(self) -> str:
        return self._last[0][0]

    def note(self, org: str, now: float) -> None:
        if self._last[0][0] != org:
            self._last[1] = self._last[0]
        self._last[0] = org, now

    def have_other(self, org: str, since: float) -> bool:
        return self.last_other(org) > since

    def last_other(self, org: str) -> float:
        """When it was done last for another org."""
        return max((at for other, at in self._last if other != org), default=-math.inf)


class Health:
    """Of one replica, as one brain sees it. Times are seconds of a monotonic clock."""

    __slots__ = (
        "_accusers",
        "_ejections",
        "_failures",
        "_last_failure",
        "_refused",
        "_returned_at",
        "_served",
        "_until",
        "unreachable",
    )

    def __init__(self, now: float, *, is_new: bool = False) -> None:
        """`is_new`: it has come to others that are warm, and begins slowly."""
        self.unreachable = ""  # why, in a sentence
        self._failures = 0
        self._accusers: set[str] = set()  # orgs whose failures are among those
        self._served = LastOrgs()
        self._refused = LastOrgs()
        self._ejections = 0
        self._last_failure = now
        self._until = now  # it is ejected until then
        self._returned_at = now if is_new else now - SLOW_START_SECONDS

    def state(self, now: float) -> State:
        if self.unreachable:
            return State.UNREACHABLE
        if now < self._until:
            return State.EJECTED
        return State.SLOW_START if now < self._returned_at + SLOW_START_SECONDS else State.READY

    def has_room(self, in_progress: int, now: float) -> bool:
        """Whether it may get one more request, having so many."""
        match self.state(now):
            case State.READY:
                return True
            case State.SLOW_START:
                return in_progress < math.pow(2.0, max(0.0, now - self._returned_at))
            case _:
                return False

    def succeeded(self, org: str, now: float) -> None:
        """It has begun to answer a request of this org."""
        self._failures = 0
        self._accusers.clear()
        self._served.note(org, now)

    def failed(self, org: str, now: float, *, is_proven: bool) -> bool:
        """A request of this org failed for a reason that may lie with the replica. Returns whether it is
        ejected for it."""
        serves_others = self._served.have_other(org, now - SERVED_SECONDS)
        if not is_proven and org in self._accusers and serves_others:
            return False
        self._accusers.add(org)
        if now - self._last_failure > FORGOTTEN_SECONDS:
            self._ejections = 0
        self._last_failure = now
        self._failures += 1
        if self._failures < FAILURES_MAX or now < self._until:
            return False
        self._failures = 0
        self._accusers.clear()
        seconds = min(EJECTED_SECONDS * 2.0 ** min(self._ejections, 16), EJECTED_SECONDS_MAX)
        self._ejections += 1
        self._until = self._returned_at = now + seconds
        return True

    def refused(self, org: str, now: float) -> bool:
        """It failed a request of this org that another replica then served. Returns whether it fails
        others', too: the one before was another org's, or it has served no other org since it failed
        one. Nearly all may be of one org, and a replica that fails all of them gets few."""
        before, other_at = self._refused.last, self._refused.last_other(org)
        self._refused.note(org, now)
        if other_at <= now - FORGOTTEN_SECONDS:
            return False
        return before != org or other_at > self._served.last_other(org)

    def lost(self, why: str) -> bool:
        """No connection can be had. Returns whether that is new."""
        is_new = not self.unreachable
        self.unreachable = why
        return is_new

    def probed(self, now: float) -> None:
        """It answers again."""
        if self.unreachable:
            self.unreachable = ""
            self._failures = 0
            self._returned_at = max(now, self._until)
