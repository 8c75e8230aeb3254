"""The lifecycle of an alert: which state follows from which, and when. Pure.

    quiet ──breach──▶ pending ──pending period over──▶ firing ──clear for long enough──▶ resolved
                         │                               │  ▲
                         └──────────── no data ──────────┴──▶ no_data

No data is a state of its own: an alert never resolves because a process stopped reporting.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final


class State(StrEnum):
    QUIET = "quiet"  # was pending, and cleared before it fired
    PENDING = "pending"
    FIRING = "firing"
    NO_DATA = "no_data"
    RESOLVED = "resolved"


OPEN: Final = (State.PENDING, State.FIRING, State.NO_DATA)
NOTIFIED: Final = (State.FIRING, State.NO_DATA)  # channels are notified of these


class Verdict(StrEnum):
    """The result of a condition for one instance at one moment."""

    BREACH = "breach"
    OK = "ok"
    NO_DATA = "no_data"
    GONE = "gone"  # what was judged does not exist any more: nothing is waited for


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The state of one instance of a rule."""

    state: State
    begun_at: datetime  # first breach of this episode
    fired_at: datetime | None = None
    fine_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Delays:
    """How long a breach must last to fire, and how long it must be clear to resolve."""

    pending: timedelta
    keep_firing: timedelta


def advance(before: Lifecycle, verdict: Verdict, delays: Delays, at: datetime) -> Lifecycle:
    """The lifecycle after a verdict at a moment."""
    if verdict is Verdict.BREACH:
        return _breach(before, delays, at)
    if before.state not in OPEN:
        return before
    if verdict is Verdict.NO_DATA:
        return Lifecycle(State.NO_DATA, before.begun_at, before.fired_at)
    if verdict is Verdict.GONE:
        delays = Delays(delays.pending, timedelta(0))
    return _clear(before, delays, at)


def _breach(before: Lifecycle, delays: Delays, at: datetime) -> Lifecycle:
    if before.state not in OPEN:
        before = Lifecycle(State.PENDING, at)
    fires = before.fired_at is not None or at - before.begun_at >= delays.pending
    state = State.FIRING if fires else State.PENDING
    return Lifecycle(state, before.begun_at, before.fired_at or (at if fires else None))


def _clear(before: Lifecycle, delays: Delays, at: datetime) -> Lifecycle:
    if before.fired_at is None:
        return Lifecycle(State.QUIET, before.begun_at)
    fine_since = before.fine_since or at
    if at - fine_since >= delays.keep_firing:
        return Lifecycle(State.RESOLVED, before.begun_at, before.fired_at)
    # After no_data it fires again until it has been clear for long enough.
    return Lifecycle(State.FIRING, before.begun_at, before.fired_at, fine_since)
