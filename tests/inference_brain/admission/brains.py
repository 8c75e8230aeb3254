"""Brains that share a Redis, in a time of their own."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import redis

from inference_brain.admission import Rejected, Room, exchange
from inference_brain.admission.exchange import Exchange
from inference_brain.admission.limits import Asked, LimitTable, Use
from inference_brain.admission.pool import Pool
from inference_brain.desired import Limits

SCRIPT = Path(exchange.__file__).with_name("counters.lua").read_text()
SERVER_SECONDS = 1_700_000_000.4  # when the brains' clocks are 0


class Brain:
    """Without asyncio: it asks when it is told to."""

    def __init__(self, world: World, number: int, skew: float = 0.0) -> None:
        self.world = world
        self.skew = skew
        self.limits = LimitTable(is_shared=True)
        self.pools: dict[str, Pool] = {}
        self.exchange = Exchange(f"brain-{number}/{secrets.token_hex(2)}", self.limits, self.pools)

    @property
    def now(self) -> float:
        return self.world.now + self.skew

    def pool(self, model: str, room: Room) -> Pool:
        return self.pools.setdefault(model, Pool(room))

    def sync(self) -> None:
        question = self.exchange.question(self.now, self.world.server_time)
        self.exchange.answered(self.world.ask(question), self.now)

    def take(self, org: str, limits: Limits, tokens: int, *, is_away: bool = False) -> Use | Rejected:
        """As `Admission` does. `is_away`: Redis does not answer."""
        try:
            use = self.limits.take(org, limits, tokens, self.now)
            if use is None and is_away:
                use = self.limits.take(org, limits, tokens, self.now, Asked.IN_VAIN)
            elif use is None:
                self.sync()
                use = self.limits.take(org, limits, tokens, self.now, Asked.ANSWERED)
        except Rejected as refused:
            return refused
        assert use is not None
        return use


class World:
    def __init__(self, client: redis.Redis) -> None:
        self.now = 0.0
        self.brains: list[Brain] = []
        self._client = client
        self._script = client.register_script(SCRIPT)
        self._prefix = f"tidegate:routing:test-{secrets.token_hex(4)}:"

    @property
    def server_time(self) -> float:
        return SERVER_SECONDS + self.now

    def brain(self, skew: float = 0.0) -> Brain:
        self.brains.append(Brain(self, len(self.brains), skew))
        return self.brains[-1]

    def ask(self, question: tuple[bytes, bytes]) -> Any:
        return self._script(args=[self._prefix, *question])
