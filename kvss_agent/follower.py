"""Following desired documents: each newest one, and anew where something could not be done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kvss_agent.desired import Desired

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 10.0  # between attempts at what could not be done


class Follower:
    """Follows one part of the documents, whatever becomes of the others. Belongs to one event loop."""

    def __init__(
        self,
        desired: Callable[[], Desired | None],
        follow: Callable[[Desired | None], Awaitable[None]],
        is_unfinished: Callable[[], bool],
    ) -> None:
        """`follow` does all that a document asks for. It is called again for the same one if it raises,
        or if something `is_unfinished`."""
        self.observed_generation = 0  # of the last document that was tried as a whole
        self._desired, self._follow, self._is_unfinished = desired, follow, is_unfinished
        self._has_failed = False
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """There is a document that may be new."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            is_unfinished = self._has_failed or self._is_unfinished()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RETRY_SECONDS if is_unfinished else None)
            self._changed.clear()
            desired = self._desired()
            try:
                await self._follow(desired)
            except Exception:
                log.exception("Cannot apply the desired document; retrying soon")
                self._has_failed = True
            else:
                self._has_failed = False
                self.observed_generation = desired.generation if desired else 0
