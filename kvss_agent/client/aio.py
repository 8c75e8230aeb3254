"""The client for asyncio: the verbs of `ShardClient`, awaited.

Copies and blocking sockets are for threads, so each client has its own: one for evicts, which keeps
their order, and a few for everything else. The loop goes on meanwhile: the Python mover holds the
interpreter for 256 KiB at a time, the native one not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from kvss_agent.client import ShardClient
from kvss_agent.client import connect as connect_blocking

REQUESTS_AT_ONCE: Final = 8

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    verb: Callable[Concatenate[ShardClient, P], T], *, in_order: bool = False
) -> Callable[Concatenate[AsyncShardClient, P], Coroutine[Any, Any, T]]:
    """This verb of the client, called in a thread; `in_order`: one such call after the other."""

    async def call(self: AsyncShardClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        pool = self._evicts if in_order else self._requests
        bound: Callable[P, T] = getattr(self.client, verb.__name__)
        return await self._run(pool, lambda: bound(*arguments, **named))

    return call


class AsyncShardClient:
    """A `ShardClient`, awaited. Evicts are numbered in the order in which they are begun.

    A call that is cancelled goes on in its thread to its end: memory that it was given must be left
    alone until then. `settled` waits for that.
    """

    def __init__(self, client: ShardClient) -> None:
        self.client = client
        self._evicts = ThreadPoolExecutor(1, "kvss-evict")
        self._requests = ThreadPoolExecutor(REQUESTS_AT_ONCE, "kvss-request")
        self._running: set[asyncio.Future[Any]] = set()

    evict = _awaited(ShardClient.evict, in_order=True)
    evict_batch = _awaited(ShardClient.evict_batch, in_order=True)
    wait_applied = _awaited(ShardClient.wait_applied, in_order=True)
    refill = _awaited(ShardClient.refill)
    view = _awaited(ShardClient.view)
    delete = _awaited(ShardClient.delete)
    exists = _awaited(ShardClient.exists)
    spill = _awaited(ShardClient.spill)
    recall = _awaited(ShardClient.recall)
    tier_delete = _awaited(ShardClient.tier_delete)
    purge = _awaited(ShardClient.purge)

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
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return await asyncio.shield(future)


def _opened(
    blocking: Callable[P, ShardClient],
) -> Callable[P, Coroutine[Any, Any, AsyncShardClient]]:
    async def connect(*arguments: P.args, **named: P.kwargs) -> AsyncShardClient:
        """Open a shard, see `kvss_agent.client.connect`. Close it, or use it with `async with`."""
        return AsyncShardClient(await asyncio.to_thread(blocking, *arguments, **named))

    return connect


connect = _opened(connect_blocking)
