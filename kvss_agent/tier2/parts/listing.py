"""Finding files that the index does not know: of other agents, and at the start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from kvss_agent.shard.core import batches
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Fault, Found, Progress, Seen, ignore_progress
from kvss_agent.tier2.column_file import plausible
from kvss_agent.tier2.index import Limits
from kvss_agent.tier2.parts.looks import Looker
from kvss_agent.tier2.parts.removal import Remover
from kvss_agent.tier2.parts.state import StoreState

_STEP: Final = 10_000  # columns that a rebuild enters before others have their turn
_REMOVED_AT_ONCE: Final = 1_000  # of what a refresh finds too old


class Lister:
    """Looks for files, and enters in the index what it finds."""

    def __init__(self, state: StoreState, remover: Remover, looker: Looker) -> None:
        self._state, self._work, self._remover = state, state.execution, remover
        self._looker = looker

    async def adopt(self, addresses: Sequence[Address]) -> set[Address]:
        """Ask the backend for these, and enter those that are there."""
        there = set()
        now = self._state.clock()  # none is younger: one of a clock that is ahead would overstay
        for address, seen in (await self._looker.look(addresses)).items():
            if (
                isinstance(seen, Seen)
                and plausible(seen.bytes)
                and self._state.may_be_elsewhere(address)
            ):
                self._state.index.adopt(address, seen.bytes, written=min(seen.modified, now))
                there.add(address)
        return there

    async def rebuild(self, progress: Progress) -> int:
        with self._state.listing() as is_gone:
            return await self._rebuild(progress, is_gone)

    async def refresh(self, limits: Callable[[], Limits]) -> int:
        """Learn what others wrote and removed, as far as the caps have room: nothing is evicted for it.
        What lies there for longer than its org allows goes, whoever wrote it. How many those were.
        `limits`: those of the moment, since listing takes a while."""
        with self._state.listing() as is_gone:
            before, listed = list(self._state.index.idle()), self._state.clock()
            found = await self.files(ignore_progress)
            await self._remove_missing(before, found)
            overdue, now, allowed = list[Address](), self._state.clock(), limits()
            for count, file in enumerate(found):
                if not count % _STEP:
                    await asyncio.sleep(0)
                address, written = file.address, min(file.modified, now)
                if is_gone(address) or not plausible(file.bytes) or self._state.is_purging(address):
                    continue
                if not self._state.may_be_elsewhere(address):
                    # A recall has not told how old it is.
                    self._state.index.date(address, written, listed, self._state.clock())
                    continue
                seconds = allowed.of(address.tag)
                if seconds is not None and written + seconds < now:
                    overdue.append(address)
                else:
                    self._state.index.adopt(address, file.bytes, written=written)
        count = 0
        for some in batches(overdue, _REMOVED_AT_ONCE):
            if self._state.is_closing:  # which would else wait for all of them
                break
            # What has been stored since the listing is new.
            gone = [address for address in some if self._state.may_be_elsewhere(address)]
            await self._remover.remove_listed(gone)
            count += len(gone)
        return count

    async def _rebuild(self, progress: Progress, is_gone: Callable[[Address], bool]) -> int:
        before = list(self._state.index.idle())
        found = await self.files(progress)
        found.sort(key=lambda file: file.modified)
        damaged, purging = [], 0
        now = self._state.clock()  # as in `adopt`
        for count, file in enumerate(found):
            if not count % _STEP:
                await asyncio.sleep(0)
            if is_gone(file.address):
                continue
            if not plausible(file.bytes):
                damaged.append(file.address)
            elif self._state.is_purging(file.address):
                purging += 1
            else:
                self._state.index.adopt(
                    file.address, file.bytes, written=min(file.modified, now), beyond_caps=True
                )
        await self._remove_missing(before, found)
        if damaged:
            self._state.counts.damaged += len(damaged)
            await self._remover.delete(damaged)
        await self._remover.trim_all()
        return purging

    async def files(self, progress: Progress) -> list[Found]:
        loop = asyncio.get_running_loop()

        def report(done: int, total: int | None) -> None:
            if self._state.is_closing:  # a listing may take long, and one that makes no sense for ever
                raise Failed(Fault.OTHER, "the store is being closed")
            loop.call_soon_threadsafe(progress, done, total)

        return await self._work.run(self._work.writes, lambda: list(self._state.backend.files(report)))

    async def _remove_missing(self, before: Sequence[Address], found: Sequence[Found]) -> None:
        """Drop columns that were known before a listing, are not in it, and do not exist."""
        listed = {file.address for file in found}
        missing = [a for a in before if a not in listed and self._state.index.knows(a)]
        for address, seen in zip(
            missing, await self._work.run(self._work.reads, self._state.seen, missing), strict=True
        ):
            if seen is None and self._state.index.knows(address):
                self._state.index.remove(address)
