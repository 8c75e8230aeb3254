"""How an operation goes on, as a pure function of where it is and what its step said. No Django.

Forward step by step; back, in the opposite order, once something failed or somebody cancelled. A step
that has begun counts as done when it is taken back, since nobody knows how far it came. From the first
step that is `final` there is no way back: what fails there waits for a person, and so does what fails on
the way back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, TypeAlias

ATTEMPTS_MAX: Final = 30  # of one step that ends neither well nor badly: its process dies each time


class State(StrEnum):
    RUNNING = "running"
    UNDOING = "undoing"  # something failed, or somebody cancelled: it goes back to where it was
    STUCK = "stuck"  # neither on nor back: a person has to look. It still holds its target
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # and everything is as it was before
    CANCELLED = "cancelled"  # likewise

    @property
    def moves(self) -> bool:
        return self in MOVING


MOVING: Final = (State.RUNNING, State.UNDOING)
ENDED: Final = (State.SUCCEEDED, State.FAILED, State.CANCELLED)


@dataclass(frozen=True, slots=True)
class Done:
    """This step has had its effect."""

    message: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not yet: look again after a while. `part` is how much of the step is done, from 0 to 1.

    `topics`: whose news may be what it waits for. Who has some wakes it (`services.wake`), so that it
    need not wait for the while to be over.
    """

    message: str
    part: float = 0.0
    seconds: float = 1.0
    topics: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Failed:
    """It can't be done. `reason` is a word for machines, `detail` a sentence for people."""

    reason: str
    detail: str


Outcome: TypeAlias = Done | Waiting | Failed


@dataclass(frozen=True, slots=True)
class Shape:
    """What the machine's steps are like: how long each may wait, and which is the first final one."""

    patience: tuple[timedelta, ...]
    first_final: int | None = None

    @property
    def total(self) -> int:
        return len(self.patience)


@dataclass(frozen=True, slots=True)
class Position:
    """`step` is the one to be done next, or on the way back the one to be taken back next."""

    state: State
    step: int
    since: datetime  # when this step was begun
    attempts: int = 0
    error: Failed | None = None  # why it goes back
    message: str = ""
    part: float = 0.0

    def percent(self, shape: Shape) -> int:
        """How much of all steps is done; on the way back it sinks."""
        if self.state is State.SUCCEEDED:
            return 100
        if self.state in (State.FAILED, State.CANCELLED):
            return 0
        sign = -1 if self.error else 1
        done = self.step + (1 if self.error else 0) + sign * self.part
        return max(0, min(99, int(100 * done / shape.total)))


CANCELLED: Final = "Cancelled"


def can_go_back(position: Position, shape: Shape) -> bool:
    """Whether it would, if somebody wanted it. Once a final step may have begun it is too late."""
    return position.state is State.RUNNING and not _is_final(position, shape)


def cancelled(position: Position, shape: Shape, now: datetime) -> Position:
    """Go back because somebody wants it, where it can; else no change."""
    if not can_go_back(position, shape):
        return position
    return _back(position, Failed(CANCELLED, "It was cancelled."), now)


def worn_out(position: Position, shape: Shape, now: datetime) -> Position:
    """Its step never came to an end, so often that it is not tried again."""
    return after(
        position,
        Failed(
            "NeverEnds", f"A step was begun {position.attempts} times and ended in no way: see the log."
        ),
        shape,
        now,
    )


def after(position: Position, outcome: Outcome, shape: Shape, now: datetime) -> Position:
    """Where it is when its current step, or the taking back of it, has said this."""
    if isinstance(outcome, Waiting):
        if now - position.since <= shape.patience[position.step]:
            part = max(0.0, min(1.0, outcome.part))
            return replace(position, attempts=0, message=outcome.message, part=part)
        outcome = Failed("TookTooLong", f"It took too long. {outcome.message}")
    if isinstance(outcome, Failed):
        if position.state is State.UNDOING or _is_final(position, shape):
            return replace(position, state=State.STUCK, message=outcome.detail, attempts=0)
        return _back(position, outcome, now)
    if position.state is State.UNDOING:
        return _undone(position, now)
    step = position.step + 1
    state = State.SUCCEEDED if step == shape.total else State.RUNNING
    return Position(state, step, now, message=outcome.message)


def again(position: Position, now: datetime) -> Position:
    """A person wants what is stuck to be tried again, in the direction that it had."""
    if position.state is not State.STUCK:
        return position
    state = State.UNDOING if position.error else State.RUNNING
    return replace(position, state=state, since=now, attempts=0)


def _is_final(position: Position, shape: Shape) -> bool:
    return shape.first_final is not None and position.step >= shape.first_final


def _back(position: Position, error: Failed, now: datetime) -> Position:
    return Position(State.UNDOING, position.step, now, error=error, message=error.detail)


def _undone(position: Position, now: datetime) -> Position:
    """What it said on its way is over: from here on it says again why it goes back."""
    error = position.error
    if error is None:
        raise RuntimeError("nothing goes back without a reason")
    if position.step:
        return Position(State.UNDOING, position.step - 1, now, error=error, message=error.detail)
    state = State.CANCELLED if error.reason == CANCELLED else State.FAILED
    return Position(state, 0, now, error=error, message=error.detail)
