"""Who waits for a fair lock has it before who has had it."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from swdriver_shim.fair_lock import FairLock


def test_who_waits_is_next() -> None:
    lock, order = FairLock(), list[str]()

    def wait() -> None:
        with lock:
            order.append("who waits")

    with lock:
        waiting = threading.Thread(target=wait)
        waiting.start()
        while not lock._next.locked():
            time.sleep(0.001)
    for _ in range(3):
        with lock:
            order.append("who had it")
    waiting.join()
    assert order == ["who waits", *["who had it"] * 3]


def test_one_at_a_time_also_after_an_error() -> None:
    lock, inside, together = FairLock(), list[int](), list[int]()

    def use(number: int) -> None:
        for turn in range(200):
            with contextlib.suppress(ZeroDivisionError), lock:
                inside.append(number)
                together.append(len(inside))
                inside.remove(number)
                assert turn / (turn % 7) > 0

    threads = [threading.Thread(target=use, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1] * 800


class Stopped(BaseException):
    """What the handler of a signal raises."""


@pytest.fixture
def stops() -> Iterator[None]:
    """Timers whose signal raises `Stopped`."""

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("stops")
def test_it_is_free_after_a_signal_whose_handler_raises() -> None:
    lock = FairLock()

    def take_until_stopped() -> None:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 1e-3))
        while True:
            with lock:
                pass

    def is_free() -> bool:
        if is_taken := lock._held.acquire(blocking=False):
            lock._held.release()
        return is_taken and not lock._next.locked()

    with ThreadPoolExecutor(1) as other:
        for _ in range(100):
            with pytest.raises(Stopped):
                take_until_stopped()
            assert other.submit(is_free).result()
