"""Routers whose decisions a test makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inference_brain.picker import Answer, Asked, Place, Refused


@dataclass
class RecordedPlace:
    """Remembers what it is told."""

    endpoints: Sequence[str]
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = "/v1/completions"
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    rewrite: Callable[[bytes, bool], bytes] = lambda data, _: data
    told: list[object] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, status: int, served: str | None) -> None:
        self.told.append(("answered", status, served))

    def received(self, data: bytes, *, ends: bool) -> bytes:
        self.told.append(data)
        return self.rewrite(data, ends)

    def ended(self, *, whole: bool) -> None:
        self.told.append(("ended", whole))
        self.over.set()


class RecordedRouter:
    """Decides by a function, and keeps what was asked and every place."""

    def __init__(self, decide: Callable[[Asked], RecordedPlace | Answer]) -> None:
        self.decide = decide
        self.is_ready = True
        self.asked: list[Asked] = []
        self.places: list[RecordedPlace] = []
        self.wait: asyncio.Event | None = None  # before each decision
        self.waiting = asyncio.Event()
        self.given_up = asyncio.Event()

    def whose(self, headers: Mapping[str, str]) -> str:
        return "" if headers.get("authorization") == "Bearer unknown" else "acme"

    async def route(self, asked: Asked) -> Place | Answer:
        self.asked.append(asked)
        if self.wait:
            self.waiting.set()
            try:
                await self.wait.wait()
            except asyncio.CancelledError:
                self.given_up.set()
                raise
        decided = self.decide(asked)
        if isinstance(decided, Answer):
            raise Refused(decided)
        self.places.append(decided)
        return decided
