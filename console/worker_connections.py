"""Connections to PostgreSQL in the processes of a worker: kept from task to task.

Celery's support for Django closes the pool of a forked process before and after each task: each task
would log in anew, and have PostgreSQL begin a process for it. A connection that goes back to the pool is
checked when it is taken again, as in every other process.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from celery.fixups.django import DjangoFixup, DjangoWorkerFixup  # type: ignore[attr-defined]
from django.db import connections


class WorkerFixup(DjangoWorkerFixup):  # type: ignore[misc]
    """Celery's, which gives connections back to their pool where that closes the pool."""

    def on_task_prerun(self, sender: Any, **_: Any) -> None:
        if not sender.request.is_eager:
            connections.close_all()

    def on_task_postrun(self, sender: Any, **_: Any) -> None:
        if not sender.request.is_eager:
            connections.close_all()
            self.close_cache()


class Fixup(DjangoFixup):
    @cached_property
    def worker_fixup(self) -> WorkerFixup:
        return WorkerFixup(self.app)


def fixup(app: Any) -> Fixup:
    """As Celery asks for it."""
    made = Fixup(app)
    made.install()
    return made
