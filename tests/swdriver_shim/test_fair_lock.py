"""Who waits for a fair lock has it before who has had it."""

from __future__ import annotations

import contextlib
import threading
import time

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
