"""A good org beside the attack: it loads and stores all the time, compares every byte, and is timed.

It is the one who must not notice anything: no other bytes, no error, and nothing missed that it was told
is stored. There is room for all that it stores, so a miss is a loss.
"""

from __future__ import annotations

import json
import random
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import httpx

from swdriver_shim.keys import COLUMN_TOKENS
from tests.hostile.scene import EACH, ORGS, Scene

PROMPTS: Final = 32
PAUSE_SECONDS: Final = 0.01  # between two requests: an engine computes meanwhile
_LENGTH: Final = struct.Struct("<I")


class Served(NamedTuple):
    """One load, and the store that followed it if something was missing. Seconds."""

    at: float
    load_seconds: float
    store_seconds: float | None
    asked: int
    hit: int


def tokens_of(prompt: int) -> list[int]:
    """Two to four columns that no other prompt begins with."""
    return [prompt * 100_000 + number for number in range(COLUMN_TOKENS * (2 + prompt % 3))]


def kv_of(prompt: int, tokens: int) -> bytes:
    return bytes((prompt * 7 + number) % 251 for number in range(tokens * EACH))


class Caller:
    """Who asks a driver in the name of an org."""

    def __init__(self, url: str, token: str, *, seconds: float = 30.0, **more: object) -> None:
        headers = {"authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=seconds, **more)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def load(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        answer = self.http.post("/v1/load", json={"tokens": tokens})
        answer.raise_for_status()
        (length,) = _LENGTH.unpack_from(answer.content)
        head = json.loads(answer.content[4 : 4 + length])
        return head["tokens"], answer.content[4 + length :]

    def store(self, tokens: Sequence[int], kv: bytes) -> httpx.Response:
        head = json.dumps({"tokens": tokens}).encode()
        return self.http.post("/v1/store", content=_LENGTH.pack(len(head)) + head + kv)

    def ask(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json=body)


@dataclass
class Tenant:
    """Serves requests until it is told to end. `failed`, `wrong` and `lost` stay empty."""

    caller: Caller
    served: list[Served] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    lost_tokens: int = 0
    _stored: dict[int, int] = field(default_factory=dict)

    def serve_until(self, ends: threading.Event) -> None:
        chosen = random.Random(11)
        while not ends.wait(PAUSE_SECONDS):
            try:
                self._serve(min(int(chosen.expovariate(0.25)), PROMPTS - 1))
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.failed.append(f"{error!r}")

    def _serve(self, prompt: int) -> None:
        tokens = tokens_of(prompt)
        began = time.monotonic()
        found, refilled = self.caller.load(tokens)
        loaded = time.monotonic()
        if refilled != kv_of(prompt, found):
            self.wrong.append(f"prompt {prompt}: {found} tokens of other bytes")
        if found < self._stored.get(prompt, 0):
            self._lose(prompt, self._stored[prompt] - found)
        stored = None
        if found < len(tokens):
            answer = self.caller.store(tokens, kv_of(prompt, len(tokens)))
            answer.raise_for_status()
            stored = time.monotonic() - loaded
            if answer.json()["columns"] * COLUMN_TOKENS != len(tokens) - found:
                self.failed.append(f"prompt {prompt}: {found} tokens were there, stored {answer.text}")
                return
        self._stored[prompt] = len(tokens)
        self.served.append(Served(time.monotonic(), loaded - began, stored, len(tokens), found))

    def _lose(self, prompt: int, tokens: int) -> None:
        """Note it, with what the driver says of each column."""
        self.lost_tokens += tokens
        why = self.caller.ask("explain", tokens=tokens_of(prompt)).text
        self.lost.append(f"prompt {prompt}: {tokens} tokens, of which the driver says {why}")


@dataclass(frozen=True)
class Report:
    """What became of a tenant's requests. Plain values, for another process."""

    served: Sequence[Served]
    failed: Sequence[str]
    wrong: Sequence[str]
    lost: Sequence[str]
    lost_tokens: int

    def load_seconds(self, since: float, until: float) -> list[float]:
        """Of the loads that ended then, in order of size."""
        return sorted(one.load_seconds for one in self.served if since <= one.at < until)


def serve(scene: Scene, ends: threading.Event) -> Report:
    """Be the tenant of a scene until told to end."""
    with Caller(scene.driver_url, scene.callers[ORGS[0]], **scene.tls) as caller:
        tenant = Tenant(caller)
        tenant.serve_until(ends)
    return Report(tenant.served, tenant.failed, tenant.wrong, tenant.lost, tenant.lost_tokens)


def is_served(scene: Scene) -> bool:
    """Whether the driver knows the tenant: not between a purge and the keys that follow it."""
    with Caller(scene.driver_url, scene.callers[ORGS[0]], **scene.tls) as caller:
        return caller.ask("query", tokens=tokens_of(0)).is_success


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of an ordered list; NaN of nothing."""
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
