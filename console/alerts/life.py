"""The life of an alert: which state follows from which, and when. Pure.

    quiet ──breach──▶ pending ──for long enough──▶ firing ──fine for long enough──▶ resolved
                         │                           │  ▲
                         └──────── nobody knows ─────┴─▶ no_data

Nothing known is a state of its own: what is silent is never taken for well.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final


class State(StrEnum):
    QUIET = "quiet"  # was pending, and did not last
    PENDING = "pending"
    FIRING = "firing"
    NO_DATA = "no_data"
    RESOLVED = "resolved"


OPEN: Final = (State.PENDING, State.FIRING, State.NO_DATA)
TOLD: Final = (State.FIRING, State.NO_DATA)  # what people are told of


class Verdict(StrEnum):
    """What the numbers say of one instance at one moment."""

    BREACH = "breach"
    FINE = "fine"
    NO_DATA = "no_data"


@dataclass(frozen=True, slots=True)
class Life:
    """Where one instance of a rule is."""

    state: State
    begun_at: datetime  # of this episode: its first breach
    fired_at: datetime | None = None
    fine_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a breach has to last to fire, and how long all has to be well until it is over."""

    breach: timedelta
    fine: timedelta


def begin(verdict: Verdict, patience: Patience, at: datetime) -> Life | None:
    """The life of an instance that there was none of. What is well or unknown needs none."""
    if verdict is not Verdict.BREACH:
        return None
    return after(Life(State.QUIET, at), verdict, patience, at)


def after(life: Life, verdict: Verdict, patience: Patience, at: datetime) -> Life:
    """The life that follows when this is known of `at`."""
    if verdict is Verdict.BREACH:
        return _breach(life, patience, at)
    if life.state not in OPEN:
        return life
    if verdict is Verdict.NO_DATA:
        return Life(State.NO_DATA, life.begun_at, life.fired_at)
    return _fine(life, patience, at)


def _breach(life: Life, patience: Patience, at: datetime) -> Life:
    if life.state not in OPEN:
        life = Life(State.PENDING, at)
    fires = life.fired_at is not None or at - life.begun_at >= patience.breach
    state = State.FIRING if fires else State.PENDING
    return Life(state, life.begun_at, life.fired_at or (at if fires else None))


def _fine(life: Life, patience: Patience, at: datetime) -> Life:
    if life.fired_at is None:
        return Life(State.QUIET, life.begun_at)
    fine_since = life.fine_since or at
    if at - fine_since >= patience.fine:
        return Life(State.RESOLVED, life.begun_at, life.fired_at)
    # Of what was silent something is known again: until it is over it goes on firing.
    return Life(State.FIRING, life.begun_at, life.fired_at, fine_since)
