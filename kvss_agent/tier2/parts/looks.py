"""Looking whether files are there, of which only the backend can tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Fault, Seen
from kvss_agent.tier2.parts.state import StoreState

UNREACHABLE_SECONDS: Final = 5.0  # for which a backend that did not answer is not looked at
_NOT_ASKED: Final = Failed(Fault.UNREACHABLE, "it did not answer a moment ago")


class Looker:
    """In threads of its own: nothing that is read waits behind a backend that does not answer."""

    def __init__(self, state: StoreState) -> None:
        self._state, self._work = state, state.execution
        self._unreachable_until = 0.0  # of the monotonic clock

    async def look(self, addresses: Sequence[Address]) -> dict[Address, Seen | Failed | None]:
        """What is seen of each: None if it is not there, Failed if nobody can tell, which is counted."""
        threads = 1 if self._state.backend.looks_together else self._work.threads
        step = -(-len(addresses) // threads) or 1
        batches = [addresses[start : start + step] for start in range(0, len(addresses), step)]
        found: dict[Address, Seen | Failed | None] = {}
        for some in await asyncio.gather(*map(self._look, batches)):
            found |= some
        return found

    async def _look(self, addresses: Sequence[Address]) -> dict[Address, Seen | Failed | None]:
        try:
            seen = await self._work.run(self._work.looks, self._seen, addresses)
        except Failed as failed:
            self._state.counts.count_fault(failed)
            return dict.fromkeys(addresses, failed)
        for one in seen:
            if isinstance(one, Failed) and one is not _NOT_ASKED:
                self._state.counts.count_fault(one)
        return dict(zip(addresses, seen, strict=True))

    def _seen(self, addresses: Sequence[Address]) -> Sequence[Seen | Failed | None]:
        """In a thread. Raises Failed."""
        if time.monotonic() < self._unreachable_until:
            return [_NOT_ASKED] * len(addresses)
        try:
            return self._state.look_at(addresses)
        except Failed as failed:
            if failed.fault is Fault.UNREACHABLE:
                self._unreachable_until = time.monotonic() + UNREACHABLE_SECONDS
            raise
