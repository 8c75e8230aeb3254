"""Threads of servers that are late: finds tests that look at something before it is done.

    PYTHONPATH=tests/late LATE_SEND=0.01 LATE_WAKE=0.05 .venv/bin/python -m pytest tests/inference_brain

Such a test passes nearly always, and fails on another machine when nobody looks. Here the thread that
has sent an answer rests, so whoever has received it comes first. It holds in all processes of the run,
whole stacks too (`tests.late.told`), but not for the thread in which pytest runs tests: that is the one
that looks.

`LATE_SEND`: seconds after each send. `LATE_FILE`: seconds after each renaming, linking and removal of a
file. `LATE_WAKE`: at most so many, at random, after what a thread has waited for, and before what a
pool's thread is given; one time in five.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread
from typing import Any, Final

SEND: Final = float(os.environ.get("LATE_SEND", "0"))
FILE: Final = float(os.environ.get("LATE_FILE", "0"))
WAKE: Final = float(os.environ.get("LATE_WAKE", "0"))
CHANCE: Final = 0.2

# pytest itself, or one of those in which its parallel runs have their tests.
_RUNS_TESTS: Final = any(
    word == "pytest" or word.endswith(("/pytest", "eval(sys.stdin.readline()))"))
    for word in sys.orig_argv
)
_sleep: Final = time.sleep  # tests have clocks of their own
_random: Final = random.Random()


def _is_late() -> bool:
    return not (_RUNS_TESTS and threading.current_thread() is threading.main_thread())


def _after_send() -> None:
    if _is_late():
        _sleep(SEND)


def _after_file() -> None:
    if _is_late():
        _sleep(FILE)


def _at_random() -> None:
    if _is_late() and _random.random() < CHANCE:
        _sleep(_random.random() * WAKE)


def _nothing() -> None: ...


def _rest(
    of: Any, name: str, *, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing
) -> None:
    original = getattr(of, name)

    def call(*given: Any, **named: Any) -> Any:
        before()
        found = original(*given, **named)
        after()
        return found

    setattr(of, name, call)


# Processes that start in another directory find this, too.
_folders: Final = os.environ["PYTHONPATH"].split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, _folders))
if SEND:
    for its in ("send", "sendall", "sendmsg"):
        _rest(socket.socket, its, after=_after_send)
if FILE:
    for its in ("rename", "replace", "link", "unlink", "remove"):
        _rest(os, its, after=_after_file)
if WAKE:
    _rest(threading.Event, "wait", after=_at_random)
    _rest(selectors.EpollSelector, "select", after=_at_random)
    _rest(thread._WorkItem, "run", before=_at_random)
