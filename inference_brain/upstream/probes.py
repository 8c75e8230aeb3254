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

from inference_brain.upstream.fleet import Fleet, Replica
from kvss_agent.http.client.client import Client
from kvss_agent.http.client.failures import Late, UpstreamFailed

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
        self._asking: dict[Replica, asyncio.Task[UpstreamFailed | None]] = {}

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
            for asking in list(self._asking.values()):
                asking.cancel()

    def _is_due(self, replica: Replica) -> bool:
        if replica in self._running:
            return False
        if replica.health.unreachable:
            return True
        return bool(replica.in_progress) and self._clock() - replica.heard_at > SILENT_SECONDS

    async def _probe(self, replica: Replica) -> None:
        if await self._failure(replica) is None:
            self._fleet.answered(replica)
            return
        replica.silent_probes += 1
        if replica.silent_probes >= SILENT_PROBES_MAX:
            self._fleet.fell_silent(replica)

    async def why_gone(self, replica: Replica) -> UpstreamFailed | None:
        """Ask a replica whose answer was cut off, by nobody knows whom: why it can't serve, or None if
        it can. One that does not answer in time may be busy. Who asks while it is being asked waits for
        the same answer, so that many clients that leave cost one request."""
        asking = self._asking.get(replica)
        if asking is None:
            asking = self._asking[replica] = asyncio.create_task(self._failure(replica))
            asking.add_done_callback(lambda _: self._asking.pop(replica))
        failure = await asyncio.shield(asking)
        return None if isinstance(failure, Late) else failure

    async def _failure(self, replica: Replica) -> UpstreamFailed | None:
        """Of one probe."""
        url = replica.url(_PROBED[replica.spec.engine])
        try:
            async with self._client.open("GET", url, {}, seconds=ANSWER_SECONDS) as answer:
                return UpstreamFailed("It is not healthy.") if answer.status >= 500 else None
        except UpstreamFailed as error:
            return error
