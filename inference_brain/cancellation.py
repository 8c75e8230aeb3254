"""Cancellation that others may have swallowed."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task is cancelled. Redis' client may swallow that while it
    waits for an answer."""
    if (this := asyncio.current_task()) and this.cancelling():
        raise asyncio.CancelledError
