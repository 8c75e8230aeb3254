"""Whether a request is served, and when: limits, fair queues, places. The thin part that awaits."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from inference_brain import metrics
from inference_brain.admission.exchange import Exchange, Loads
from inference_brain.admission.limits import Asked, LimitTable, Use
from inference_brain.admission.place import Ended, Place
from inference_brain.admission.pool import Pool, Waiting
from inference_brain.admission.shared import Rounds, Shared
from inference_brain.admission.ticket import Capacity, Reason, Rejected, Ticket
from inference_brain.choice.candidates import Load
from telemetry.metrics import Sink, put

LOOK_SECONDS: Final = 0.1  # at what the replicas can take; others are in step as often
ENTERED_AT_REST_MAX: Final = 2  # requests between two answers: what more of them may use is asked ahead
NO_REPLICA_SECONDS: Final = 5.0  # after which one may be there


def _nothing() -> None:
    """Nobody has to know."""


class Figures(NamedTuple):
    """Of queues, for metrics: taken by the event loop, read from any thread. `gap`: the largest
    difference between the counters of two orgs that both wait for one model."""

    queued: dict[str, int]
    gap: float
    flights: dict[str, int]

    def collect(self, into: Sink) -> None:
        put(into, metrics.QUEUED, self.queued)
        put(into, metrics.FAIRNESS_GAP, self.gap)
        put(into, metrics.SINGLE_FLIGHT, self.flights)


NO_FIGURES = Figures({}, 0.0, {})


def figures(pools: Iterable[Pool]) -> Figures:
    queued, flights = Counter[str](), Counter[str]()
    gap = 0.0
    for pool in pools:
        queued.update(pool.queue.orgs)
        flights.update(led=pool.flights.led, waited=pool.flights.waited, gave_up=pool.flights.gave_up)
        counters = [pool.counters[org] for org in pool.queue.orgs]
        gap = max(gap, max(counters) - min(counters)) if counters else gap
    return Figures(dict(queued), gap, dict(flights))


class Admission:
    """Of one brain. Used from one event loop. `elsewhere`: what other brains have sent to replicas."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        name: str = "brain",
        loads: Callable[[], Loads] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`loads`: what this brain has sent to each replica, by model, for other brains."""
        self._capacity = capacity
        self._clock = clock
        self._futures: dict[Waiting, asyncio.Future[None]] = {}
        self._timers: dict[Pool, asyncio.TimerHandle] = {}
        self.pools: dict[str, Pool] = {}
        self.limits = LimitTable()
        process = f"{name}/{secrets.token_hex(4)}"  # which has no grants of an earlier one
        self._exchange = Exchange(process, self.limits, self.pools, loads)
        self._rounds: Rounds | None = None
        self._has_rounds = asyncio.Event()
        self._entered = 0  # since the last answer
        self._figures = NO_FIGURES

    def share(self, shared: Shared) -> None:
        """From now on there may be other brains, which use the same Redis. `run` follows them."""
        self.limits.is_shared = True
        self._rounds = Rounds(shared, self._exchange, self._clock, self.changed, self._may_rest)
        self._has_rounds.set()

    @property
    def elsewhere(self) -> Mapping[tuple[str, str], Load]:
        """What other brains have sent to replicas, by model and replica."""
        return self._exchange.elsewhere

    @property
    def is_connected(self) -> bool:
        """Whether this brain knows of the others."""
        return self._rounds is not None and self._rounds.is_connected

    async def run(self) -> None:
        """Keep in step with replicas and other brains, until it is cancelled."""
        while self._rounds is None:
            self.changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._has_rounds.wait()
        await self._rounds.run()

    async def enter(self, ticket: Ticket, queued: Callable[[], None] = _nothing) -> Place:
        """Wait until a replica has room for the request. Raises Rejected. Whoever cancels it, or is
        refused, has nothing to give back. `queued` is called if it has to wait."""
        pool = self._pool(ticket.model)
        use = await self._take(ticket, pool)
        try:
            waiting = await self._wait(ticket, pool, queued)
        except BaseException:
            self.limits.leave(use)
            self.limits.settle(use, 0, 0, self._clock())
            raise
        return Place(self, waiting, use)

    def changed(self) -> None:
        """Replicas have come, gone or changed what they can take, or other brains have."""
        self._entered = 0
        for model, pool in self.pools.items():
            pool.room = self._capacity.room(model)
            self._pump(pool)
        self._figures = figures(self.pools.values())

    def forget(self, org: str | None) -> None:
        """Keep no keys of an org's prompts; of any org's without one."""
        for pool in self.pools.values():
            pool.flights.forget(org)

    def collect(self, into: Sink) -> None:
        """Its metrics, a moment old. May be called from any thread."""
        self._figures.collect(into)

    # Of places

    def routed(self, waiting: Waiting, replica: str) -> None:
        self._pool(waiting.ticket.model).flights.routed(waiting, replica)

    def first_token(self, waiting: Waiting, *, is_known: bool = True) -> None:
        pool = self._pool(waiting.ticket.model)
        pool.first_token(waiting, self._clock(), is_known=is_known)
        self._pump(pool)

    def leave(self, waiting: Waiting, use: Use, ended: Ended) -> None:
        ticket = waiting.ticket
        pool = self._pool(ticket.model)
        pool.leave(waiting, ended.computed_tokens, ended.answer_tokens)
        self.limits.leave(use)
        is_served = bool(ended.computed_tokens or ended.answer_tokens)
        prompt = (ticket.is_estimate and ended.prompt_tokens) or ticket.prompt_tokens
        tokens = prompt + ended.answer_tokens if is_served else 0
        self.limits.settle(use, int(is_served), tokens, self._clock())
        self._pump(pool)

    # Inside

    def _may_rest(self) -> bool:
        """Nothing waits for room, few requests come, and no other brain has to know what runs."""
        pools = self.pools.values()
        return (
            self._entered <= ENTERED_AT_REST_MAX
            and not any(pool.has_waiting for pool in pools)
            and (self.limits.brains == 1 or not any(pool.placed for pool in pools))
        )

    async def _take(self, ticket: Ticket, pool: Pool) -> Use:
        """Count it towards its org's limits. Raises Rejected."""
        limits = ticket.limits
        most = limits.tokens_per_minute
        if most is not None and ticket.prompt_tokens > most and not ticket.is_estimate:
            message = (
                f"The prompt has {ticket.prompt_tokens} tokens. Your organization may use {most} tokens "
                "in a minute."
            )
            raise Rejected(429, Reason.TOKENS, message, None)
        tokens = ticket.prompt_tokens + round(pool.expected_answer(ticket))
        use = self.limits.take(ticket.org, limits, tokens, self._clock())
        if use is None:
            is_answered = await self._rounds.now(ticket.org) if self._rounds else False
            asked = Asked.ANSWERED if is_answered else Asked.IN_VAIN
            use = self.limits.take(ticket.org, limits, tokens, self._clock(), asked)
        if use is None:
            raise RuntimeError("a second answer is never that it is not known")
        return use

    async def _wait(self, ticket: Ticket, pool: Pool, queued: Callable[[], None]) -> Waiting:
        now = self._clock()
        waiting = pool.enter(ticket, now, at_once=True)
        self._entered += 1
        if self._rounds:
            self._rounds.hurry()
        if waiting.is_placed:
            return waiting
        try:
            self._pump(pool)
            if not waiting.is_placed:
                future = self._futures[waiting] = asyncio.get_running_loop().create_future()
                queued()
                async with asyncio.timeout(max(0.0, waiting.expires_at - now)):
                    await future
        except BaseException as error:
            pool.leave(waiting, 0, 0)
            self._pump(pool)
            if isinstance(error, TimeoutError):
                raise self._waited_too_long(pool, waiting) from None
            raise
        finally:
            self._futures.pop(waiting, None)
        return waiting

    def _pool(self, model: str) -> Pool:
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = Pool(self._capacity.room(model))
        return pool

    def _pump(self, pool: Pool) -> None:
        now = self._clock()
        for waiting in pool.pump(now):
            future = self._futures.get(waiting)  # none: it enters just now
            if future and not future.done():  # else it was cancelled just now, and gives its place back
                future.set_result(None)
        self._set_timer(pool, now)

    def _set_timer(self, pool: Pool, now: float) -> None:
        """For who waits for another request to compute its prefix."""
        if timer := self._timers.pop(pool, None):
            timer.cancel()
        if (due := pool.next_pump()) is not None:  # mostly there is none
            loop = asyncio.get_running_loop()
            self._timers[pool] = loop.call_later(max(0.0, due - now), self._pump, pool)

    def _waited_too_long(self, pool: Pool, waiting: Waiting) -> Rejected:
        seconds = waiting.wait_seconds_max
        if not pool.room.requests:
            message = f"No replica of this model is ready, and none was for {seconds:.1f} s."
            return Rejected(503, Reason.NO_REPLICA, message, NO_REPLICA_SECONDS)
        after = pool.expected_wait(waiting.ticket, self._clock()) or 1.0
        message = f"It has waited for {seconds:.1f} s, as long as it may."
        return Rejected(503, Reason.DEADLINE, message, max(1.0, after))
