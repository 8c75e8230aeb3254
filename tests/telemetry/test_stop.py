"""Being told to stop, at any moment."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from telemetry.stop import ENDS, STOPS, StopSignal, ends_clean, undisturbed


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in {*STOPS, *ENDS}}
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    yield
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
