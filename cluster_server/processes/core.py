"""What is done next with one instance or job: pure. It reads no clock, and starts nothing.

    step = next_for_instance(wanted, seen, memory, now, Limits())

Who calls it looks at what there is, does the one step that comes back, and looks again: so it does not
matter after which step a server was killed, or how often a step is done. Three rules hold throughout:

- A process is started only where nothing of the instance runs, not even what its last manager left.
- The end of a manager is settled (`settled`, on disk) before another one is started.
- What is forgotten does not run any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

BACKOFF_FIRST_SECONDS: Final = 1.0
BACKOFF_SECONDS_MAX: Final = 60.0
STABLE_SECONDS: Final = 600.0  # a manager that ran for so long: its end counts as the first
CANCEL_SECONDS: Final = 10.0  # between SIGTERM and SIGKILL of a job
FOREVER: Final = float("inf")


class Goal(StrEnum):
    """What the file `goal` says to a manager."""

    RUN = "RUN"
    RELEASE_CACHE = "RELEASE_CACHE"
    DRAIN = "DRAIN"


class Step(StrEnum):
    MAKE = "make"  # its folder
    START = "start"
    TELL = "tell"  # the goal
    TERMINATE = "terminate"  # SIGTERM to the manager, and remember since when
    KILL = "kill"  # all processes of it
    SETTLE = "settle"  # the end of its manager
    FORGET = "forget"
    WAIT = "wait"


class Running(StrEnum):
    """The process that was recorded."""

    NEVER = "never"  # none is recorded
    YES = "yes"
    ENDED = "ended"  # and not settled


@dataclass(frozen=True, slots=True)
class Limits:
    silent_seconds: float = 60.0  # a manager that says nothing for so long is started anew


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of an instance or a job, also by the next server."""

    failures: int = 0  # ends of its manager in a row
    start_after: float = 0.0
    terminated_at: float | None = None
    is_over: bool = False  # it has ended for good
    reason: str = ""
    sentence: str = ""
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is now."""

    has_folder: bool
    process: Running = Running.NEVER
    has_others: bool = False  # processes of it run beside the recorded one
    told: Goal | None = None
    is_signalled: bool = False  # it got SIGTERM from this server
    exit_status: int | None = None  # of one that has ended; unknown to a server that was away
    started_at: float = 0.0
    last_seen: float = 0.0  # when its manager has answered, or was started

    @property
    def is_alive(self) -> bool:
        return self.process is Running.YES or self.has_others


@dataclass(frozen=True, slots=True)
class Next:
    step: Step
    wake_at: float = FOREVER  # look again then, if nothing happens before


def next_for_instance(
    wanted: Goal | None, grace_seconds: float, seen: Seen, memory: Memory, now: float, limits: Limits
) -> Next:
    """`wanted`: None for an instance that should not be there. Its goal never leaves DRAIN."""
    if wanted is None:
        return _ending(seen, memory, now, grace_seconds)
    if not seen.has_folder:
        return Next(Step.MAKE)
    if seen.process is Running.YES:
        if seen.told is not wanted:
            return Next(Step.TELL)
        silent_at = seen.last_seen + limits.silent_seconds
        return Next(Step.KILL) if now >= silent_at else Next(Step.WAIT, silent_at)
    if seen.has_others:
        return Next(Step.KILL)
    if seen.process is Running.ENDED:
        return Next(Step.SETTLE)
    if memory.is_over:
        return Next(Step.WAIT)
    if wanted is Goal.DRAIN:
        return Next(Step.SETTLE)
    if now < memory.start_after:
        return Next(Step.WAIT, memory.start_after)
    return Next(Step.TELL) if seen.told is not wanted else Next(Step.START)


def next_for_job(seen: Seen, memory: Memory, now: float, *, is_unwanted: bool, may_start: bool) -> Next:
    """`is_unwanted`: it is cancelled, or past its deadline. A job that is over stays until it is
    forgotten."""
    if memory.is_over:
        return Next(Step.KILL) if seen.is_alive else Next(Step.WAIT)
    if seen.process is Running.YES:
        return _terminating(seen, memory, now, CANCEL_SECONDS) if is_unwanted else Next(Step.WAIT)
    if seen.has_others:
        return Next(Step.KILL)
    if seen.process is Running.ENDED or is_unwanted:
        return Next(Step.SETTLE)
    return Next(Step.START) if may_start else Next(Step.WAIT)


def _ending(seen: Seen, memory: Memory, now: float, grace_seconds: float) -> Next:
    if seen.process is Running.YES:
        return _terminating(seen, memory, now, grace_seconds)
    if seen.has_others:
        return Next(Step.KILL)
    return Next(Step.FORGET) if seen.has_folder else Next(Step.WAIT)


def _terminating(seen: Seen, memory: Memory, now: float, grace_seconds: float) -> Next:
    """It is asked once more by a server that can't know whether the one before has done so."""
    if memory.terminated_at is None:
        return Next(Step.TERMINATE)
    kill_at = memory.terminated_at + grace_seconds
    if now >= kill_at:
        return Next(Step.KILL)
    return Next(Step.WAIT, kill_at) if seen.is_signalled else Next(Step.TERMINATE)


def settled(wanted: Goal, seen: Seen, memory: Memory, now: float) -> Memory:
    """What is remembered of an instance once its manager has ended, or has nothing to drain."""
    if wanted is Goal.DRAIN:
        return replace(
            memory, is_over=True, ended_at=now, reason="Drained", sentence="It has drained and ended."
        )
    if seen.exit_status == 0:
        sentence = "Its manager has given up: see its log."
        if seen.told is Goal.DRAIN:
            sentence = "It has drained and ended."
        return replace(memory, is_over=True, ended_at=now, reason="Ended", sentence=sentence)
    is_stable = now - seen.started_at >= STABLE_SECONDS
    failures = 1 if is_stable else memory.failures + 1
    pause = backoff_seconds(failures)
    how = _how(seen.exit_status)
    times = "" if failures == 1 else f", for the {_ordinal(failures)} time"
    return replace(
        memory,
        failures=failures,
        start_after=now + pause,
        reason="ManagerEnded",
        sentence=f"Its manager has ended{how}{times}; it starts again after {pause:g} s.",
    )


def clamped(memory: Memory, now: float) -> Memory:
    """What a server reads that another one has written, whose clock may have been another."""
    began = memory.terminated_at
    return replace(
        memory,
        start_after=min(memory.start_after, now + BACKOFF_SECONDS_MAX),
        terminated_at=None if began is None else min(began, now),
    )


def backoff_seconds(failures: int) -> float:
    """Before the next start, after so many ends in a row."""
    return float(min(BACKOFF_FIRST_SECONDS * 2 ** min(failures - 1, 16), BACKOFF_SECONDS_MAX))


def _how(exit_status: int | None) -> str:
    if exit_status is None:
        return ""
    if exit_status < 0:
        return f" by signal {-exit_status}"
    return f" with exit status {exit_status}"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
