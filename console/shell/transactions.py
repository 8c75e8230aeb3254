"""Transactions that may be ended by the database although nothing is wrong with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from django.db import OperationalError, connection
from psycopg.errors import DeadlockDetected

log = logging.getLogger(__name__)

T = TypeVar("T")


def is_deadlock(error: Exception) -> bool:
    return isinstance(error, OperationalError) and isinstance(error.__cause__, DeadlockDetected)


def retried(change: Callable[[], T]) -> T:
    """Do what makes a transaction of its own; once more, if that and another waited for each other.

    PostgreSQL then ends one of the two, and nothing of it has happened. Locks are taken in one order
    wherever somebody has thought of it; this is for where nobody has. It is logged.
    """
    try:
        return change()
    except OperationalError as error:
        if not is_deadlock(error) or connection.in_atomic_block:
            raise
        log.warning("Two transactions waited for each other, so this one begins again: %s", error)
    return change()
