"""A service in rounds, while PostgreSQL does not answer."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from django.db import connection, transaction

from telemetry.stop import STOPS
from telemetry.store.rounds import run_rounds


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGALRM)}
    timer = signal.getitimer(signal.ITIMER_REAL)
    yield
    signal.setitimer(signal.ITIMER_REAL, *timer)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.unfreeze()


@pytest.mark.django_db(transaction=True)
def test_who_is_told_to_stop_in_a_statement_that_has_no_answer_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("telemetry.stop.LEAVE_SECONDS", 0.01)
    frozen: list[int] = []

    def one_round() -> float:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            frozen.extend(cursor.fetchone())
            os.kill(frozen[0], signal.SIGSTOP)
            signal.raise_signal(signal.SIGTERM)
            cursor.execute("SELECT 1")
        return 0.0

    try:
        run_rounds(one_round)
    finally:
        os.kill(frozen[0], signal.SIGCONT)
    assert len(frozen) == 1
    with connection.cursor() as cursor:  # another connection
        cursor.execute("SELECT pg_backend_pid()")
        assert cursor.fetchone() != (frozen[0],)
