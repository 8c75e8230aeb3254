"""Removing files: one column, a purge of a scope, and evicting until the caps hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Removed
from kvss_agent.tier2.parts.state import StoreState


class Remover:
    """Removes files and their entries in the index. All of it raises Failed."""

    def __init__(self, state: StoreState) -> None:
        self._state, self._work = state, state.execution

    async def delete(self, addresses: Sequence[Address]) -> Removed:
        await self._until_idle(addresses)
        return await self.remove(addresses)

    async def remove(self, addresses: Sequence[Address]) -> Removed:
        """Remove files that nobody uses. What the index does not know, the backend may."""
        sizes = {address: self._state.index.begin_removal(address) for address in addresses}
        unknown = [address for address, size in sizes.items() if not size] if self._state.shared else []
        gone = [size for size in sizes.values() if size]
        with self._leaving(addresses):
            if unknown:
                found = await self._work.run(self._work.writes, self._state.seen, unknown)
                gone += [seen.bytes for seen in found if seen]
            await self._delete(addresses)
        return Removed(len(gone), sum(gone))

    async def remove_damaged(self, addresses: Sequence[Address]) -> set[Address]:
        """What was read of these is not what they should be. Those that stay, since there is another
        copy."""
        for address in addresses:
            self._state.index.begin_removal(address)
        left: Sequence[bool] = [True] * len(addresses)
        try:
            names = [address.name for address in addresses]
            left = await self._work.run(self._work.writes, self._state.backend.damaged, names)
        finally:
            for address, is_left in zip(addresses, left, strict=True):
                if is_left:
                    self._state.index.cancel_removal(address)
                else:
                    self._state.index.finish_removal(address)
            self._work.changed()
        return {address for address, is_left in zip(addresses, left, strict=True) if is_left}

    async def remove_listed(self, addresses: Sequence[Address]) -> None:
        """Remove files of which a listing has just said that they are there."""
        await self._until_idle(addresses)
        for address in addresses:
            self._state.index.begin_removal(address)
        await self.remove_leaving(addresses)

    async def _until_idle(self, addresses: Sequence[Address]) -> None:
        index = self._state.index
        await self._work.until(lambda: not any(index.is_busy(address) for address in addresses))

    async def remove_leaving(self, addresses: Sequence[Address]) -> None:
        with self._leaving(addresses):
            await self._delete(addresses)

    async def purge(self, scope: Scope) -> Removed:
        with self._state.closed_to([scope]):
            await self._work.until(lambda: not self._state.index.any_busy(scope))
            known = list(self._state.index.idle(scope))
            for address in known:
                self._state.index.begin_removal(address)
            with self._leaving(known):
                removed = await self._work.run(self._work.writes, self._state.backend.purge, scope)
            self._state.note_purged(scope)
            return removed

    async def trim(self) -> None:
        """Evict until all caps hold, as far as nobody is using what would have to go."""
        while leaving := self._state.index.trim():
            await self.evict(leaving)

    async def trim_all(self) -> None:
        """Evict until all caps hold, also what is being read or written now."""
        await self.trim()
        while self._state.index.any_exceeds():
            await self._work.change.wait()
            await self.trim()

    async def evict(self, leaving: Mapping[Address, int]) -> None:
        await self.remove_leaving([*leaving])
        self._state.counts.count_evicted(leaving)

    async def _delete(self, addresses: Sequence[Address]) -> None:
        names = [address.name for address in addresses]
        await self._work.run(self._work.writes, self._state.backend.delete, names)

    @contextlib.contextmanager
    def _leaving(self, addresses: Sequence[Address]) -> Iterator[None]:
        """Columns whose removal has begun leave the index at the end of this; they stay if it fails."""
        try:
            yield
        except BaseException:  # whatever it is: what leaves for ever is waited for, for ever
            for address in reversed(addresses):
                self._state.index.cancel_removal(address)
            raise
        else:
            for address in addresses:
                self._state.index.finish_removal(address)
        finally:
            self._work.changed()
