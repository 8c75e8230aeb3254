"""Celery tasks that beat asks for again and again: what one finds locked is left to its next round.

A migration, a backup or a repair may hold a table for minutes. A task that waited for it would keep its
worker from all else, and the next round would take the next worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from celery import shared_task
from django.db import OperationalError, connection, transaction
from psycopg.errors import LockNotAvailable
from psycopg.pq import TransactionStatus

log = logging.getLogger(__name__)

LOCK_TIMEOUT: Final = "500ms"  # for each statement: most rounds come within seconds
_SET: Final = f"SELECT set_config('lock_timeout', '{LOCK_TIMEOUT}', true)"


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
            if not isinstance(error.__cause__, LockNotAvailable):
                raise
            log.warning("%s is left to its next round: something is locked", work.__name__)

    return done


def _within_time(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:  # noqa: FBT001 - as Django calls it
    """Within the transaction, since behind a pooler the next one may be on another connection."""
    if not connection.in_atomic_block:
        with transaction.atomic():
            _set()
            return execute(sql, params, many, context)
    if connection.connection.info.transaction_status == TransactionStatus.IDLE:  # its first statement
        _set()
    return execute(sql, params, many, context)


def _set() -> None:
    with connection.wrap_database_errors:  # who catches errors of the database knows Django's
        connection.connection.execute(_SET)
