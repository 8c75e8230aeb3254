"""Being told to stop, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from console.environment import PROJECT
from telemetry.stop import ENDS, STOPS, StopSignal, end_as_first_process, ends_clean, undisturbed


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in {*STOPS, *ENDS, signal.SIGALRM}}
    timer = signal.getitimer(signal.ITIMER_REAL)  # of the test
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    yield
    signal.setitimer(signal.ITIMER_REAL, *timer)
    for number, handler in before.items():
        signal.signal(number, handler)


def steps_of_a_look(told_at: int = -1) -> tuple[int, bool]:
    """How many steps of Python a wait of no time took, and whether it is told to stop by then. At one of
    the steps comes SIGTERM."""
    stop, steps = StopSignal(), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        if event == "opcode":
            if steps == told_at:
                signal.raise_signal(signal.SIGTERM)
            steps += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        stop.wait(0.0)
    finally:
        sys.settrace(before)
    return steps, stop.is_set()


def test_a_signal_at_any_step_of_a_wait_is_taken() -> None:
    steps, is_told = steps_of_a_look()
    assert not is_told
    assert all(steps_of_a_look(step)[1] for step in range(steps))


@pytest.mark.parametrize("number", STOPS)
def test_one_before_a_wait_counts_and_so_may_a_second_one(number: signal.Signals) -> None:
    stop = StopSignal()
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert stop.is_set()
    assert stop.wait(3600.0)


def test_one_during_a_wait_ends_it() -> None:
    stop = StopSignal()
    teller = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
    teller.start()
    assert stop.wait(3600.0)
    teller.join()


def test_work_that_does_not_end_is_left_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is done only then, as an end in order."""
    monkeypatch.setattr("telemetry.stop.LEAVE_SECONDS", 0.01)
    stop, lock, met = StopSignal(), threading.Lock(), []

    def wait() -> bool:
        try:
            if not stop.is_set():
                signal.raise_signal(signal.SIGTERM)
            return lock.acquire() and lock.acquire()
        finally:
            met.append("the end")
            if lock.locked():
                lock.release()

    assert stop.run(wait) is None
    assert stop.run(wait) is None
    assert met == ["the end"] * 2
    assert stop.run(lambda: "work that ends") == "work that ends"


def test_what_is_no_such_work_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.stop.LEAVE_SECONDS", 0.01)
    stop = StopSignal()
    stop.run(lambda: signal.raise_signal(signal.SIGTERM))
    while signal.getitimer(signal.ITIMER_REAL)[0]:
        pass
    assert stop.is_set()


# Says at its very end, when Python has taken the handlers away, how long it has until the alarm.
ENDING = """
import os, signal
from telemetry.stop import StopSignal, exit_within

class Last:
    def __del__(self, left=signal.getitimer, timer=signal.ITIMER_REAL, write=os.write):
        write(1, str(left(timer)[0]).encode())

last = Last()
"""


@pytest.mark.parametrize(
    "told", ["exit_within(3600)", "StopSignal(); os.kill(os.getpid(), signal.SIGTERM)"]
)
def test_what_ends_in_order_is_killed_by_no_alarm(told: str) -> None:
    command = [sys.executable, "-c", ENDING + told]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, check=True, text=True)
    assert done.stdout == "0.0"


@pytest.mark.parametrize("first", ENDS)
@pytest.mark.parametrize("second", ENDS)
def test_a_second_signal_does_not_disturb_the_end(first: signal.Signals, second: signal.Signals) -> None:
    removed = []

    @ends_clean()
    def work() -> None:
        try:
            signal.raise_signal(first)
        finally:
            signal.raise_signal(second)
            removed.append("the draft")

    with pytest.raises(SystemExit) as ended:
        work()
    assert removed
    assert ended.value.code == 128 + first
    assert [signal.getsignal(number) for number in ENDS] == [signal.SIG_DFL] * len(ENDS)


@pytest.mark.parametrize("first", ENDS)
def test_nor_does_it_disturb_an_end_that_has_failed_on_its_way(first: signal.Signals) -> None:
    removed = []

    @ends_clean()
    def work() -> None:
        try:
            try:
                signal.raise_signal(first)
            finally:
                raise OSError("this draft cannot be removed")
        except OSError:
            signal.raise_signal(first)
            removed.append("another one")

    work()
    assert removed


def test_a_signal_counts_though_an_earlier_one_came_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls a handler also while it deletes an object, and drops what is raised there."""

    class Deleted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    @ends_clean()
    def work() -> None:
        Deleted()
        signal.raise_signal(signal.SIGTERM)

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: dropped.append(told.exc_type))
    with pytest.raises(SystemExit) as ended:
        work()
    assert dropped == [SystemExit]
    assert ended.value.code == 128 + signal.SIGTERM


def test_who_ends_at_once_as_the_first_process_ends_clean_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("telemetry.stop.FIRST", os.getpid())
    end_as_first_process()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), ends_clean():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before is not signal.SIG_DFL


def test_what_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ends_clean():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_what_is_undisturbed_ends_before_a_signal_is_handled() -> None:
    done = []

    @ends_clean()
    def work() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGTERM)
            done.append("all of it")
        done.append("and more")

    with pytest.raises(SystemExit) as ended:
        work()
    assert done == ["all of it"]
    assert ended.value.code == 128 + signal.SIGTERM
