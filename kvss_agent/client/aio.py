"""The client for asyncio: the verbs of `ShardClient`, awaited.

Copies and blocking sockets are for threads, so each client brings its own: one for evicts, which keeps
their order, and a few for everything else. The loop goes on meanwhile: the Python mover holds the
interpreter for 256 KiB at a time, the native one not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self, TypeVar

from kvss_agent.client import (
    TIER_SECONDS,
    WAIT_SECONDS,
    Address,
    Column,
    Credentials,
    Evict,
    Header,
    Miss,
    Purged,
    Recalled,
    ShardClient,
    TierAnswer,
    Transport,
    Views,
    Wanted,
)
from kvss_agent.client import connect as connect_blocking
from kvss_agent.mover import Mover

REQUESTS_AT_ONCE: Final = 8

T = TypeVar("T")


async def connect(
    address: str | Address,
    shard: str,
    credentials: Credentials,
    *,
    transport: Transport = "auto",
    mover: Mover | None = None,
    write: bool = True,
) -> AsyncShardClient:
    """Open a shard, see `kvss_agent.client.connect`. Close it, or use it with `async with`."""
    made = await asyncio.to_thread(
        lambda: connect_blocking(
            address, shard, credentials, transport=transport, mover=mover, write=write
        )
    )
    return AsyncShardClient(made)


class AsyncShardClient:
    """A `ShardClient`, awaited. Evicts are numbered in the order in which they are begun.

    A call that is cancelled goes on in its thread to its end: memory that it was given must be left
    alone until then. `settled` waits for that.
    """

    def __init__(self, client: ShardClient) -> None:
        self.client = client
        self._evicts = ThreadPoolExecutor(1, "kvss-evict")
        self._requests = ThreadPoolExecutor(REQUESTS_AT_ONCE, "kvss-request")
        self._running: set[asyncio.Future[object]] = set()

    async def evict(self, slot: int, key: bytes, tag: bytes, tokens: int, payload: memoryview) -> int:
        return await self._run(self._evicts, lambda: self.client.evict(slot, key, tag, tokens, payload))

    async def evict_batch(self, columns: Sequence[Evict]) -> int:
        return await self._run(self._evicts, lambda: self.client.evict_batch(columns))

    async def wait_applied(self, number: int, seconds: float = WAIT_SECONDS) -> None:
        await self._run(self._evicts, lambda: self.client.wait_applied(number, seconds))

    async def refill(
        self,
        wanted: Sequence[Wanted],
        into: Sequence[memoryview],
        *,
        wait_seconds: float = WAIT_SECONDS,
    ) -> list[Header | Miss]:
        return await self._run(
            self._requests, lambda: self.client.refill(wanted, into, wait_seconds=wait_seconds)
        )

    async def view(self, wanted: Sequence[Wanted], *, wait_seconds: float = WAIT_SECONDS) -> Views:
        return await self._run(
            self._requests, lambda: self.client.view(wanted, wait_seconds=wait_seconds)
        )

    async def delete(
        self, slots: Sequence[int], *, scrub: bool = False, wait_seconds: float = WAIT_SECONDS
    ) -> Miss | None:
        return await self._run(
            self._requests,
            lambda: self.client.delete(slots, scrub=scrub, wait_seconds=wait_seconds),
        )

    async def exists(self, columns: Sequence[Column]) -> list[bool]:
        return await self._run(self._requests, lambda: self.client.exists(columns))

    async def spill(
        self,
        columns: Sequence[Wanted],
        *,
        notes: Sequence[int] = (),
        data_key: bytes = b"",
        wait_seconds: float = WAIT_SECONDS,
        seconds: float = TIER_SECONDS,
    ) -> list[TierAnswer | Miss]:
        return await self._run(
            self._requests,
            lambda: self.client.spill(
                columns, notes=notes, data_key=data_key, wait_seconds=wait_seconds, seconds=seconds
            ),
        )

    async def recall(
        self,
        columns: Sequence[Wanted],
        *,
        data_key: bytes = b"",
        wait_seconds: float = WAIT_SECONDS,
        seconds: float = TIER_SECONDS,
    ) -> list[Recalled | Miss]:
        return await self._run(
            self._requests,
            lambda: self.client.recall(
                columns, data_key=data_key, wait_seconds=wait_seconds, seconds=seconds
            ),
        )

    async def tier_delete(self, columns: Sequence[Column]) -> list[TierAnswer | Miss]:
        return await self._run(self._requests, lambda: self.client.tier_delete(columns))

    async def purge(self, tag: bytes, *, seconds: float = TIER_SECONDS) -> Purged | None:
        return await self._run(self._requests, lambda: self.client.purge(tag, seconds=seconds))

    async def settled(self) -> None:
        """Return when nothing is under way any more, cancelled calls included."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Leave. What is under way ends with `Lost`."""
        await asyncio.to_thread(self.client.close)
        self._evicts.shutdown(wait=False)
        self._requests.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(pool, call)
        self._running.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._running.discard)
        return await asyncio.shield(future)
