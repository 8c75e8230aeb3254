"""Transactions that may be ended by the database although nothing is wrong with them: two that waited
for each other, and those that a primary took with it when it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import psycopg
from django.db import Error, OperationalError, connection
from psycopg.errors import DeadlockDetected, ReadOnlySqlTransaction
from psycopg_pool import PoolTimeout

log = logging.getLogger(__name__)

T = TypeVar("T")


def is_deadlock(error: Exception) -> bool:
    return isinstance(error, OperationalError) and isinstance(error.__cause__, DeadlockDetected)


def is_connection_lost(error: Exception) -> bool:
    """Whether the server is gone, ends, or is no primary any more. Nobody knows what became of a
    transaction that was being committed then."""
    cause = error.__cause__
    if not isinstance(error, Error) or not isinstance(cause, psycopg.Error) or is_away(error):
        return False
    state = cause.sqlstate or ""
    if isinstance(cause, ReadOnlySqlTransaction) or state.startswith(("08", "57P")):
        return True
    return not state and isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)


def is_away(error: Exception) -> bool:
    """Whether there was no connection to be had for as long as somebody waits for one."""
    return isinstance(error, Error) and isinstance(error.__cause__, PoolTimeout)


def retried(change: Callable[[], T]) -> T:
    """Do what makes a transaction of its own; once more, if that and another waited for each other, or
    the connection was lost.

    Of two that wait for each other PostgreSQL ends one, and nothing of it has happened. Locks are taken
    in one order wherever somebody has thought of it; this is for where nobody has. After a lost
    connection it may have happened: `change` has to notice, as what has an Idempotency-Key does.
    """
    try:
        return change()
    except Error as error:
        if connection.in_atomic_block:
            raise
        if is_deadlock(error):
            log.warning("Two transactions waited for each other, so this one begins again: %s", error)
        elif is_connection_lost(error):
            log.warning("The connection to PostgreSQL was lost, so this begins again: %s", error)
            connection.close()
        else:
            raise
    return change()
