"""Requests to a driver that never stop, each of whose refilled bytes is checked."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import httpx
from django.db import transaction

from console.accounts.principal import SYSTEM
from console.orgs import services as orgs
from console.policies import callers
from console.policies import services as policies
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.console.sessions.planes import EACH
from tests.swdriver_shim.daemons import C, Daemon

PROMPTS = 24
PAUSE_SECONDS = 0.01  # other processes have work to do as well


class Served(NamedTuple):
    """One request: when it ended, the tokens that it asked for, and those that were there."""

    at: float
    asked: int
    hit: int


def kv(prompt: int, tokens: int) -> bytes:
    """What this prompt's KV is, shard by shard, each token by token: of each prompt another."""
    return b"".join(
        bytes((prompt * 7 + shard * 31 + number) % 251 for number in range(tokens * each))
        for shard, each in enumerate(EACH)
    )


def tokens_of(prompt: int) -> list[int]:
    """Between two and four columns, which no other prompt begins with."""
    return [prompt * 100_000 + number for number in range(C * (2 + prompt % 3))]


def engine_with_tier2(org: str) -> str:
    """The token of a new caller of an org whose columns may be in tier 2."""
    with transaction.atomic():
        found = orgs.for_change(SYSTEM, org)
        allowed = OrgPolicies(policy=Policy(tiers=Tiers.TIER2))
        policies.set_policy(SYSTEM, found, allowed, reason="tier 2 outlives an agent")
        _, token = callers.add_caller(SYSTEM, found, name="engine")
    return token


@dataclass
class Load:
    """`served`, until the block ends; `failed` and `wrong` say what should not have happened."""

    driver: Daemon
    token: str
    served: list[Served] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _ends: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(60)

    @property
    def requests(self) -> int:
        return len(self.served)

    def hit_rate(self, since: float = 0.0, until: float = float("inf")) -> float | None:
        """Tokens that were there to tokens asked for, between two moments; None without traffic."""
        found = [one for one in self.served if since <= one.at < until]
        asked = sum(one.asked for one in found)
        return sum(one.hit for one in found) / asked if asked else None

    def _run(self) -> None:
        chosen = random.Random(7)
        while not self._ends.wait(PAUSE_SECONDS):
            prompt = min(int(chosen.expovariate(0.25)), PROMPTS - 1)
            try:
                self._serve(prompt)
            except (httpx.HTTPError, AssertionError, KeyError) as error:
                self.failed.append(repr(error))

    def _serve(self, prompt: int) -> None:
        tokens = tokens_of(prompt)
        found, refilled = self.driver.load(self.token, tokens)
        if refilled != kv(prompt, found):
            self.wrong.append(f"prompt {prompt}: {found} tokens")
        if found < len(tokens):
            answer = self.driver.store(self.token, tokens, kv(prompt, len(tokens)))
            assert answer.status_code == 200, answer.text
        self.served.append(Served(time.monotonic(), len(tokens), found))
