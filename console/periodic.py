"""Celery tasks that beat asks for again and again: what one finds locked is left to its next round.

A migration, a backup or a repair may hold a table for minutes. A task that waited for it would keep its
worker from all else, and the next round would take the next worker.

Only for the fleet, which is given to those who plan in the order of their arrival, one task at a time
waits longer: see `taking_turns`. Operations wait for it, too, and give their worker back after a while:
see `limit_lock_waits`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

from celery import shared_task
from django.conf import settings
from django.db import OperationalError, connection, transaction
from psycopg.errors import LockNotAvailable
from psycopg.pq import TransactionStatus

log = logging.getLogger(__name__)

LOCK_TIMEOUT: Final = "500ms"  # for each statement: most rounds come within seconds
TURN_SECONDS_MAX: Final = 30
_SET: Final = "SELECT set_config('lock_timeout', %s, true)"


def periodic(work: Callable[[], None]) -> Any:
    """Make a task, which ends where a statement waits longer for a lock."""
    return shared_task(impatient(work))


def impatient(work: Callable[[], None]) -> Callable[[], None]:
    """The same work, which ends there. What it has committed by then stays."""

    @wraps(work)
    def done() -> None:
        try:
            with connection.execute_wrapper(_within_time):
                work()
        except OperationalError as error:
            if not is_locked(error):
                raise
            log.warning("%s is left to its next round: something is locked", work.__name__)

    return done


def is_locked(error: BaseException) -> bool:
    """Whether a statement has waited too long for a lock."""
    return isinstance(error.__cause__, LockNotAvailable)


@contextmanager
def taking_turns() -> Iterator[None]:
    """Within a transaction of a task: wait longer for what is locked here, since others queue for it.

    With half a second a task would never have it where the queue takes longer without end. One worker
    waits so: the turn is held until the transaction ends, and a task that finds it taken ends as usual.
    It waits half of what a task may take at most: one that is stopped meanwhile stays in the queue.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('turn of a periodic task'))")
    limit_lock_waits(TURN_SECONDS_MAX)
    yield
    _set()


def limit_lock_waits(seconds: float) -> None:
    """Until the transaction ends no statement waits longer for a lock, nor for half of what a task may
    take: `is_locked` is true of what it raises then."""
    _set(f"{min(seconds, settings.CELERY_TASK_TIME_LIMIT / 2):g}s")


def _within_time(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:  # noqa: FBT001 - as Django calls it
    """Within the transaction, since behind a pooler the next one may be on another connection."""
    if not connection.in_atomic_block:
        with transaction.atomic():
            _set()
            return execute(sql, params, many, context)
    if connection.connection.info.transaction_status == TransactionStatus.IDLE:  # its first statement
        _set()
    return execute(sql, params, many, context)


def _set(timeout: str = LOCK_TIMEOUT) -> None:
    with connection.wrap_database_errors:  # who catches errors of the database knows Django's
        connection.connection.execute(_SET, [timeout])
