"""Tasks that beat asks for again and again hold no worker while others hold what they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction

from console.celery import app
from console.fleet.services import lock_fleet
from console.operations.models import Operation
from console.periodic import LOCK_TIMEOUT, impatient, taking_turns
from console.shell.transactions import is_connection_lost

pytestmark = pytest.mark.django_db(transaction=True)
app.loader.import_default_modules()
TASKS = sorted(entry["task"] for entry in app.conf.beat_schedule.values())


@contextlib.contextmanager
def locked(*tables: str) -> Iterator[None]:
    """As a migration holds them."""
    with contextlib.closing(connection.copy()) as other, other.cursor() as cursor:
        cursor.execute(f"BEGIN; LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")
        yield
        cursor.execute("ROLLBACK")


def timeout_now() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        return str(cursor.fetchone()[0])


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TASKS)
def test_no_task_waits_while_tables_are_locked(
    name: str, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    """A migration that held a lock for seconds had all workers waiting, one for each round."""
    settings.REGISTRAR_URL = settings.REDIS_URL  # or who keeps users of Redis has nothing to do
    with locked(*connection.introspection.table_names()):
        app.tasks[name]()
    assert "next round" in caplog.text or "could not be dropped" in caplog.text


def test_a_task_waits_half_a_second_for_what_is_within_a_transaction_and_what_is_not() -> None:
    told = []

    def work() -> None:
        told.append(timeout_now())
        with transaction.atomic():
            told.append(timeout_now())
            Operation.objects.exists()
            told.append(timeout_now())

    impatient(work)()
    assert told == [LOCK_TIMEOUT] * 3
    assert timeout_now() == "0", "it is of the task alone"


@pytest.mark.parametrize(("seconds_max", "turn"), [(60, "30s"), (3600, "30s"), (1, "500ms")])
def test_a_task_waits_in_the_queue_for_the_fleet_and_only_one_does(
    seconds_max: int, turn: str, settings: Any
) -> None:
    """Others who plan queue for the fleet for longer than half a second each time. A task that was
    stopped while it waited would stay in the queue, and have the fleet for nothing."""
    settings.CELERY_TASK_TIME_LIMIT = seconds_max
    told, taken = [], []

    def work() -> None:
        with transaction.atomic():
            with taking_turns():
                told.append(timeout_now())
                lock_fleet()
            told.append(timeout_now())
            with contextlib.closing(connection.copy()) as other, other.cursor() as cursor:
                cursor.execute("SELECT pg_try_advisory_lock(hashtext('turn of a periodic task'))")
                taken.extend(cursor.fetchone())

    impatient(work)()
    assert told == [turn, LOCK_TIMEOUT]
    assert taken == [False]


def test_what_a_task_has_done_before_it_met_a_lock_stays(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        Operation.objects.create(kind="tests.steps", role=1, total=1, target="here")
        with transaction.atomic():
            Operation.objects.update(target="there")
            list(Operation.objects.raw("SELECT * FROM console_locked"))

    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE console_locked (id uuid)")
    try:
        with locked("console_locked"):
            impatient(work)()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE console_locked")
    assert "work is left to its next round" in caplog.text
    assert [one.target for one in Operation.objects.all()] == ["here"]


def test_a_connection_that_is_lost_between_two_statements_is_an_error_as_tasks_catch_it() -> None:
    caught = []

    def work() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            [number] = cursor.fetchone()
        with contextlib.closing(connection.copy()) as other, other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [number])
        try:
            Operation.objects.exists()
        except DatabaseError as error:
            caught.append(is_connection_lost(error))
        assert not Operation.objects.exists(), "on another connection"

    impatient(work)()
    assert caught == [True]


def test_what_goes_wrong_otherwise_is_told() -> None:
    def work() -> None:
        raise OperationalError("the server has ended")

    with pytest.raises(OperationalError, match="has ended"):
        impatient(work)()
