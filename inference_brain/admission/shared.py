"""Redis, which has what brains share: it is asked ten times a second, and at once where a request has to
know. A brain that has nobody to be in step with asks less often.

No request waits for Redis longer than `WAIT_SECONDS`, and none at all while it is late. Without it the
brain goes on with what it knows.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from redis.exceptions import NoScriptError, RedisError

from inference_brain.admission.exchange import Exchange
from inference_brain.cancellation import raise_if_cancelled
from telemetry.decoder import Malformed
from telemetry.redis_clients import async_client

log = logging.getLogger(__name__)

PREFIX: Final = "tidegate:routing:"
PERIOD_SECONDS: Final = 0.1
REST_SECONDS: Final = 0.3  # answers are fresh for half a second
SPACING_SECONDS: Final = 0.002  # between two questions, however many requests need an answer
WAIT_SECONDS: Final = 0.02  # of one request, at most
ANSWER_SECONDS: Final = 0.25  # after which Redis counts as away
RETRY_SECONDS: Final = 0.5
PARTS_MIN: Final = 3

_SCRIPT: Final = Path(__file__).with_name("counters.lua").read_text()
_DIGEST: Final = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()  # as Redis names it


class Shared:
    """The script in one Redis. Raises RedisError or OSError where that does not answer in time."""

    def __init__(self, url: str, prefix: str = PREFIX) -> None:
        self._prefix = prefix
        self._redis = async_client(url, answer_seconds=ANSWER_SECONDS)

    async def ask(self, question: tuple[bytes, bytes]) -> Sequence[int | bytes]:
        try:
            return _parts(await self._redis.evalsha(_DIGEST, 0, self._prefix, *question))
        except NoScriptError:
            return _parts(await self._redis.eval(_SCRIPT, 0, self._prefix, *question))

    async def close(self) -> None:
        await self._redis.aclose()


def _parts(answer: Any) -> Sequence[int | bytes]:
    """Raises Malformed."""
    if not isinstance(answer, list) or len(answer) < PARTS_MIN:
        raise Malformed("Redis answered something else")
    return answer


class _Waiter(NamedTuple):
    """A request of an org that waits for an answer about it."""

    org: str
    answered: asyncio.Future[bool]


class Rounds:
    """Asks again and again, as long as `run` does. `has_news` is called after each answer."""

    def __init__(
        self,
        shared: Shared,
        exchange: Exchange,
        clock: Callable[[], float],
        has_news: Callable[[], None],
        may_rest: Callable[[], bool],
    ) -> None:
        """`may_rest`: nobody has to know soon what this brain does, or does what others do. Who changes
        that calls `hurry`."""
        self._shared = shared
        self._exchange = exchange
        self._clock = clock
        self._has_news = has_news
        self._may_rest = may_rest
        self._rests = False
        self._wanted = asyncio.Event()
        self._waiters: list[_Waiter] = []
        self._is_late = True  # nothing has been answered yet
        self.is_connected = False

    async def now(self, org: str) -> bool:
        """Ask at once about an org, for all requests that wait for this together. Returns whether an
        answer came in time."""
        if self._is_late:
            return False
        waiter = _Waiter(org, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._wanted.set()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await waiter.answered
        except TimeoutError:
            self._is_late = True
            return False

    def hurry(self) -> None:
        """Ask at once if it rests and may not any more."""
        if self._rests and not self._may_rest():
            self._rests = False
            self._wanted.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                # It rests after a whole pause of which that is so: else many requests would be as many
                # questions, since each answer begins to count them anew.
                may_rest = self._may_rest()
                is_answered = await self._round()
                raise_if_cancelled()
                await asyncio.sleep(SPACING_SECONDS if is_answered else RETRY_SECONDS)
                if is_answered:
                    await self._pause(may_rest=may_rest)
        finally:
            self._answer_waiters(self._waiters, is_answered=False)
            await self._shared.close()

    async def _pause(self, *, may_rest: bool) -> None:
        self._rests = may_rest and self._may_rest()
        try:
            async with asyncio.timeout(REST_SECONDS if self._rests else PERIOD_SECONDS):
                await self._wanted.wait()
        except TimeoutError:
            pass

    async def _round(self) -> bool:
        waiters, self._waiters = self._waiters, []
        self._wanted.clear()
        try:
            answer = await self._shared.ask(self._exchange.question(self._clock()))
            self._exchange.answered(answer, self._clock())
        except (RedisError, OSError, Malformed) as error:
            self._note(is_connected=False, why=error)
            self._exchange.failed()
            self._is_late = True
        else:
            self._note(is_connected=True)
            self._is_late = False
            # One question has so many orgs. The others are in the next, which is due at once.
            asked = self._exchange.asked
            if left := [one for one in waiters if one.org not in asked and not one.answered.done()]:
                waiters = [one for one in waiters if one.org in asked]
                self._waiters = left + self._waiters
                self._wanted.set()
        self._answer_waiters(waiters, is_answered=not self._is_late)
        self._has_news()
        return not self._is_late

    def _answer_waiters(self, waiters: list[_Waiter], *, is_answered: bool) -> None:
        for _, answered in waiters:
            if not answered.done():
                answered.set_result(is_answered)

    def _note(self, *, is_connected: bool, why: Exception | None = None) -> None:
        if is_connected != self.is_connected:
            self.is_connected = is_connected
            if is_connected:
                log.info("Redis answers: limits and fairness hold over all brains.")
            else:
                log.warning("Redis does not answer: this brain goes on with what it knows (%s).", why)
