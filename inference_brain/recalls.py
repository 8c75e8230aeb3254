"""While a request waits in the queue, the driver of the replica that it is likely to go to is asked to
recall from tier 2 what it has of the prompt.

A request that waits would otherwise wait again at the replica. What is asked for is bounded: a prompt is
asked for once in a while, and no more than so many at a time. Without Redis nothing is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from redis.exceptions import RedisError

from swdriver_shim.cache_map.codec import FIELD, SPACE_BYTES
from swdriver_shim.cache_map.recalls import STREAM_LENGTH_MAX, request
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from telemetry.records import RECALL_STREAM
from telemetry.redis_clients import async_client

log = logging.getLogger(__name__)

TOKENS_MIN: Final = 1024  # in tier 2; fewer are computed as fast
AGAIN_SECONDS: Final = 10.0  # after which the same prompt is asked for again
PENDING_MAX: Final = 64  # that Redis has not taken
KNOWN_MAX: Final = 4096
ANSWER_SECONDS: Final = 1.0


class Result(StrEnum):
    """As `brain_prefetch_total` counts it."""

    ASKED = "asked"
    REPEATED = "repeated"  # it was asked for a moment ago
    TOO_MANY = "too_many"  # are being asked for
    FAILED = "failed"  # Redis has not taken it


class Recalls:
    """Used from one event loop. `count` is told of each attempt."""

    def __init__(
        self,
        redis_url: str,
        count: Callable[[Result], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ValueError for an address that can't be used."""
        self._count = count
        self._clock = clock
        self._wall_clock = wall_clock
        self._asked: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._pending: set[asyncio.Task[None]] = set()
        self._redis = async_client(redis_url, answer_seconds=ANSWER_SECONDS)

    def ask(self, driver: str, prompt: Prompt, hit_tokens: int, tier2_tokens: int) -> None:
        """This driver has so many tokens of the prompt in memory, and so many more in tier 2, as its
        map says. Waits for nothing."""
        columns = (hit_tokens + tier2_tokens) // COLUMN_TOKENS
        if tier2_tokens < TOKENS_MIN or not columns:
            return
        keys = prompt.keys[:columns]
        if not self._is_new((driver, keys[-1])):
            self._count(Result.REPEATED)
        elif len(self._pending) >= PENDING_MAX:
            self._count(Result.TOO_MANY)
        else:
            space = prompt.maker.tag + prompt.maker.namespace.digest()[:SPACE_BYTES]
            task = asyncio.create_task(self._send(driver, request(space, keys, self._wall_clock())))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        for task in self._pending:
            task.cancel()
        await self._redis.aclose()

    def _is_new(self, name: tuple[str, bytes]) -> bool:
        now = self._clock()
        if now - self._asked.get(name, float("-inf")) < AGAIN_SECONDS:
            return False
        self._asked[name] = now
        self._asked.move_to_end(name)
        if len(self._asked) > KNOWN_MAX:
            self._asked.popitem(last=False)
        return True

    async def _send(self, driver: str, raw: bytes) -> None:
        key, fields = f"{RECALL_STREAM}driver:{driver}", dict[Any, Any]({FIELD: raw})
        try:
            await self._redis.xadd(key, fields, maxlen=STREAM_LENGTH_MAX, approximate=True)
        except (RedisError, OSError) as error:
            log.debug("Nothing is recalled while requests wait: %s", error)
            self._count(Result.FAILED)
        else:
            self._count(Result.ASKED)
