"""Probes: whether a replica that could not be reached is back, and whether a silent one still lives.

A process that hangs keeps its connections and says nothing, and without probes each of its requests
would wait as long as a first token may take. So a replica that has work and has said nothing for a while
is asked for its health. One that does not answer that either, twice, gets no more requests, and those
that it has not begun to answer go elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from inference_brain.upstream.client import Client
from inference_brain.upstream.failures import UpstreamFailed
from inference_brain.upstream.fleet import Fleet, Replica

PROBE_SECONDS: Final = 0.5  # between two looks at who has to be probed
ANSWER_SECONDS: Final = 2.0
PROBES_AT_ONCE: Final = 256
SILENT_SECONDS: Final = 3.0  # with work and without a word, before it is probed
SILENT_PROBES_MAX: Final = 2  # in a row
_PROBED: Final = {"vllm": "/health", "sglang": "/health", "other": "/v1/models"}


class Probes:
    """Of one fleet. Used from one event loop."""

    def __init__(
        self, fleet: Fleet, client: Client, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._clock = clock
        self._running: dict[Replica, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                for replica in self._fleet:
                    if self._is_due(replica) and len(self._running) < PROBES_AT_ONCE:
                        task = asyncio.create_task(self._probe(replica))
                        self._running[replica] = task
                        task.add_done_callback(lambda _, of=replica: self._running.pop(of))  # type: ignore[misc]
                await asyncio.sleep(PROBE_SECONDS)
        finally:
            for task in list(self._running.values()):
                task.cancel()

    def _is_due(self, replica: Replica) -> bool:
        if replica in self._running:
            return False
        if replica.health.unreachable:
            return True
        return bool(replica.in_progress) and self._clock() - replica.heard_at > SILENT_SECONDS

    async def _probe(self, replica: Replica) -> None:
        url = replica.url(_PROBED[replica.spec.engine])
        try:
            async with self._client.open("GET", url, {}, seconds=ANSWER_SECONDS) as answer:
                is_alive = answer.status < 500
        except UpstreamFailed:
            is_alive = False
        if is_alive:
            self._fleet.answered(replica)
            return
        replica.silent_probes += 1
        if replica.silent_probes >= SILENT_PROBES_MAX:
            self._fleet.fell_silent(replica)
