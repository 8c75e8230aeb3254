"""Running operations, also with a worker that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

from console.operations import services
from console.operations.models import Operation


def run(operation: Operation) -> Operation:
    """Advance it until it waits or has ended."""
    while services.advance(operation.pk):
        pass
    operation.refresh_from_db()
    return operation


class Killed(BaseException):
    """As hard as it gets inside of one process: nothing catches it."""


@contextmanager
def killed_at_query(number: int) -> Iterator[list[int]]:
    """Whoever sends the query of this number dies before it is sent. Yields how many were sent."""
    sent = [0]

    def wrapper(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        sent[0] += 1
        if sent[0] == number:
            raise Killed
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield sent
