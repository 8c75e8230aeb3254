"""Drivers are asked for what their replica will need of a prompt, while a request waits in the queue: to
recall it from tier 2, or to borrow it from a sibling.

A request that waits would otherwise wait again at the replica. Once it is sent, what is asked for here
may come later than the request itself: then its claim names the sibling, and only a driver that takes no
claims is asked here. What is asked for is bounded: a prompt is asked for once in a while, and no more
than so many at a time. Without Redis nothing is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from swdriver_shim.cache_map.codec import FIELD, SPACE_BYTES
from swdriver_shim.cache_map.recalls import STREAM_LENGTH_MAX, request
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from telemetry.records import RECALL_STREAM
from telemetry.redis_clients import async_client

log = logging.getLogger(__name__)

TOKENS_MIN: Final = 1024  # in tier 2, or at a sibling; fewer are computed as fast
AGAIN_SECONDS: Final = 10.0  # after which the same prompt is asked for again
PENDING_MAX: Final = 64  # that Redis has not taken
KNOWN_MAX: Final = 4096
ANSWER_SECONDS: Final = 1.0


class What(StrEnum):
    """A driver is asked for."""

    RECALL = "recall"  # from tier 2
    BORROW = "borrow"  # from a sibling


class Result(StrEnum):
    """As `brain_prefetch_total` and `brain_borrow_requests_total` count it."""

    ASKED = "asked"
    REPEATED = "repeated"  # it was asked for a moment ago
    TOO_MANY = "too_many"  # are being asked for
    FAILED = "failed"  # Redis has not taken it


class _Name(NamedTuple):
    """What was asked for: a prompt, by the key of its last column. `sibling`: empty for tier 2."""

    driver: str
    sibling: str
    last: bytes


class Recalls:
    """Used from one event loop. `count` is told of each attempt; of those to borrow `count_borrow` is,
    where it is given. Bounds hold for both together."""

    def __init__(
        self,
        redis_url: str,
        count: Callable[[Result], None],
        count_borrow: Callable[[Result], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ValueError for an address that can't be used."""
        self._counts = {What.RECALL: count, What.BORROW: count_borrow or count}
        self._clock = clock
        self._wall_clock = wall_clock
        self._asked: OrderedDict[_Name, float] = OrderedDict()
        self._pending: dict[asyncio.Task[None], bytes] = {}  # with the tags of what they ask for
        self._redis = async_client(redis_url, answer_seconds=ANSWER_SECONDS)

    def ask(self, driver: str, prompt: Prompt, hit_tokens: int, tier2_tokens: int) -> None:
        """This driver has so many tokens of the prompt in memory, and so many more in tier 2, as its
        map says. Waits for nothing."""
        if tier2_tokens >= TOKENS_MIN:
            self._ask(driver, prompt, hit_tokens + tier2_tokens)

    def borrow(
        self, driver: str, prompt: Prompt, hit_tokens: int, sibling_tokens: int, sibling: str
    ) -> None:
        """This driver has so many tokens of the prompt in memory, and its sibling so many more, as their
        maps say. Waits for nothing."""
        if sibling_tokens >= TOKENS_MIN:
            self._ask(driver, prompt, hit_tokens + sibling_tokens, sibling)

    def _ask(self, driver: str, prompt: Prompt, tokens: int, sibling: str = "") -> None:
        """For the first so many tokens, of a sibling if one is named."""
        keys = prompt.keys[: tokens // COLUMN_TOKENS]
        if not keys:
            return
        what = What.BORROW if sibling else What.RECALL
        name = _Name(driver, sibling, keys[-1])
        if self._clock() - self._asked.get(name, -math.inf) < AGAIN_SECONDS:
            self._counts[what](Result.REPEATED)
        elif len(self._pending) >= PENDING_MAX:
            self._counts[what](Result.TOO_MANY)
        else:
            self._note(name)
            tag = prompt.maker.tag
            space = tag + prompt.maker.namespace.digest()[:SPACE_BYTES]
            raw = request(space, keys, self._wall_clock(), sibling)
            task = asyncio.create_task(self._send(name, what, raw))
            self._pending[task] = tag
            task.add_done_callback(self._pending.pop)

    def forget(self, tags: Collection[bytes]) -> None:
        """Columns with these tags were purged: nothing of them is kept, and nobody is asked for them."""
        self._asked.clear()
        for task, tag in self._pending.items():
            if tag in tags:
                task.cancel()

    async def close(self) -> None:
        for task in self._pending:
            task.cancel()
        await self._redis.aclose()

    def _note(self, name: _Name) -> None:
        self._asked[name] = self._clock()
        self._asked.move_to_end(name)
        if len(self._asked) > KNOWN_MAX:
            self._asked.popitem(last=False)

    async def _send(self, name: _Name, what: What, raw: bytes) -> None:
        key, fields = f"{RECALL_STREAM}driver:{name.driver}", dict[Any, Any]({FIELD: raw})
        try:
            await self._redis.xadd(key, fields, maxlen=STREAM_LENGTH_MAX, approximate=True)
        except (RedisError, OSError) as error:
            log.debug("Drivers are not asked to recall or borrow: %s", error)
            self._asked.pop(name, None)  # nobody has been asked
            self._counts[what](Result.FAILED)
        else:
            self._counts[what](Result.ASKED)
