"""Whether a request is served, and when: limits, fair queues, places. The thin part that awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from inference_brain.admission.place import Place
from inference_brain.admission.pool import Pool, Waiting
from inference_brain.admission.ticket import Capacity, Reason, Rejected, Ticket


class Admission:
    """Of one brain. Used from one event loop."""

    def __init__(self, capacity: Capacity, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._pools: dict[str, Pool] = {}
        self._futures: dict[Waiting, asyncio.Future[None]] = {}

    async def enter(self, ticket: Ticket) -> Place:
        """Wait until a replica has room for the request. Raises Rejected. Whoever cancels it, or is
        refused, has nothing to give back."""
        pool = self._pool(ticket.model)
        now = self._clock()
        waiting = pool.enter(ticket, now)
        future = self._futures[waiting] = asyncio.get_running_loop().create_future()
        try:
            self._pump(pool)
            if not future.done():
                async with asyncio.timeout(max(0.0, waiting.expires_at - now)):
                    await future
        except BaseException as error:
            pool.leave(waiting, 0, 0)
            self._pump(pool)
            if isinstance(error, TimeoutError):
                raise self._waited_too_long(pool, ticket) from None
            raise
        finally:
            del self._futures[waiting]
        return Place(pool, waiting, lambda: self._made_room(ticket.model))

    def changed(self) -> None:
        """Replicas have come, gone or changed what they can take."""
        for model, pool in self._pools.items():
            pool.room = self._capacity.room(model)
            self._pump(pool)

    def _pool(self, model: str) -> Pool:
        room = self._capacity.room(model)
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = Pool(room)
        pool.room = room
        return pool

    def _pump(self, pool: Pool) -> None:
        for waiting in pool.pump(self._clock()):
            future = self._futures[waiting]
            if not future.done():  # else it was cancelled just now, and gives its place back
                future.set_result(None)

    def _made_room(self, model: str) -> None:
        self._pump(self._pool(model))

    def _waited_too_long(self, pool: Pool, ticket: Ticket) -> Rejected:
        seconds = ticket.wait_seconds_max
        if not pool.room.requests:
            message = f"No replica of this model is ready, and none was for {seconds:.1f} s."
            return Rejected(503, Reason.NO_REPLICA, message, 5.0)
        after = pool.expected_wait(ticket, self._clock()) or 1.0
        message = f"It has waited for {seconds:.1f} s, as long as it may."
        return Rejected(503, Reason.DEADLINE, message, max(1.0, after))
