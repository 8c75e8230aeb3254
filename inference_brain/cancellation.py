"""How tasks end: cancellation that others may have swallowed, and errors that nobody waits for."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task is cancelled. Redis' client may swallow that while it
    waits for an answer."""
    if (this := asyncio.current_task()) and this.cancelling():
        raise asyncio.CancelledError


def say_why_it_ended(task: asyncio.Task[None]) -> None:
    """For a task that runs as long as the brain does, when it has ended."""
    if not task.cancelled() and (error := task.exception()):
        log.error("What %r does is not done any more", task.get_name(), exc_info=error)
