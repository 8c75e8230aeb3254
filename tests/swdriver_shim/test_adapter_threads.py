"""Threads for the work of an engine's steps: all are there from the beginning."""

from __future__ import annotations

import threading

import pytest

from swdriver_shim.adapters.threads import start_pool

START = threading.Thread.start


def alive(name: str) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(name)]


def test_work_needs_no_thread_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start_pool(3, "of a step")

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    both = threading.Barrier(3)
    for done in [pool.submit(both.wait) for _ in range(3)]:
        done.result(10)
    pool.shutdown()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_where_the_system_has_too_few_it_says_so_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise error
        started.append(thread)
        START(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(type(error)):
        start_pool(3, "too few")
    assert not alive("too few")
