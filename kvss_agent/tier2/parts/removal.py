"""Removing files: one column, a purge of a scope, and evicting until the caps hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Failed, Removed
from kvss_agent.tier2.parts.state import StoreState


class Remover:
    """Removes files and their entries in the index. All of it raises Failed."""

    def __init__(self, state: StoreState) -> None:
        self._state, self._work = state, state.execution

    async def delete(self, addresses: Sequence[Address]) -> Removed:
        await self._work.until(
            lambda: not any(self._state.index.is_busy(address) for address in addresses)
        )
        return await self.remove(addresses)

    async def remove(self, addresses: Sequence[Address]) -> Removed:
        """Remove files that nobody uses. What the index does not know, the backend may."""
        sizes = {address: self._state.index.begin_removal(address) for address in addresses}
        unknown = [address for address, size in sizes.items() if not size] if self._state.shared else []
        try:
            found = (
                await self._work.run(self._work.writes, self._state.look_at, unknown) if unknown else []
            )
        except Failed:
            self._cancel_removal(addresses)
            raise
        await self.remove_leaving(addresses)
        gone = [size for size in sizes.values() if size] + [seen.bytes for seen in found if seen]
        return Removed(len(gone), sum(gone))

    async def remove_leaving(self, addresses: Sequence[Address]) -> None:
        try:
            await self._work.run(
                self._work.writes, self._state.backend.delete, [one.name for one in addresses]
            )
        except Failed:
            self._cancel_removal(addresses)
            raise
        self._finish_removal(addresses)

    async def purge(self, scope: Scope) -> Removed:
        with self._state.closed_to([scope]):
            await self._work.until(lambda: not self._state.index.any_busy(scope))
            known = list(self._state.index.idle(scope))
            for address in known:
                self._state.index.begin_removal(address)
            try:
                removed = await self._work.run(self._work.writes, self._state.backend.purge, scope)
            except Failed:
                self._cancel_removal(known)
                raise
            self._finish_removal(known)
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
        try:
            await self._work.run(
                self._work.writes, self._state.backend.delete, [address.name for address in leaving]
            )
        except Failed:
            self._cancel_removal([*leaving])
            raise
        self._state.counts.count_evicted(leaving)
        self._finish_removal(leaving)

    def _finish_removal(self, addresses: Iterable[Address]) -> None:
        for address in addresses:
            self._state.index.finish_removal(address)
        self._work.changed()

    def _cancel_removal(self, addresses: Sequence[Address]) -> None:
        for address in reversed(addresses):
            self._state.index.cancel_removal(address)
        self._work.changed()
