"""Asking the runner of a pod: a poll that is answered when there is something new."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from cluster_server.kubernetes.objects import RUNNER_PORT
from cluster_server.pod.runner import Asked, Report
from cluster_server.processes.manager_status import check_count, exchanged
from telemetry.decoder import MESSAGE, Limits, decode

POLL_SECONDS: Final = 30.0
OVERDUE_SECONDS: Final = 5.0  # beyond that
ANSWER_BYTES_MAX: Final = 64 << 10  # of an instance, as its manager has it
RESULT_BYTES_MAX: Final = 8 << 20  # of a job: its result, in JSON that escapes it
PAUSE_SECONDS: Final = 0.25  # from one question to the next
PAUSE_BYTES: Final = 256 << 10  # that one pod may say in a second


class Conversation:
    """With one runner, beside which engines of strangers run: however quick and long its answers are, it
    takes a small part of this server's time."""

    def __init__(
        self, address: str, key: str, bytes_max: int = ANSWER_BYTES_MAX, port: int = RUNNER_PORT
    ) -> None:
        self._address = address
        self._port = port
        self._key = key
        self._limits = Limits(bytes_max, MESSAGE.items_max)
        self._version = 0
        self._not_before = 0.0

    async def ask(self, goal: str = "", wait_seconds: float = POLL_SECONDS) -> Report:
        """What it reports next, later than its report before, or now if it has no news for so long; the
        goal is handed on first. Raises OSError and Malformed."""
        await asyncio.sleep(self._not_before - time.monotonic())
        self._not_before = time.monotonic() + PAUSE_SECONDS
        body = msgspec.json.encode(Asked(self._version, wait_seconds, goal))
        raw = await _post(
            (self._address, self._port),
            self._key,
            "/status",
            body,
            seconds_max=wait_seconds + OVERDUE_SECONDS,
            bytes_max=self._limits.bytes_max,
        )
        self._not_before = max(self._not_before, time.monotonic() + len(raw) / PAUSE_BYTES)
        report = decode(raw, Report, self._limits)
        check_count(report.version)
        if report.manager:
            report.manager.check()
        self._version = report.version
        return report


async def let_go(address: str, key: str) -> None:
    """Of a job whose result is stored. Raises OSError and Malformed."""
    await _post(
        (address, RUNNER_PORT),
        key,
        "/done",
        b"",
        seconds_max=OVERDUE_SECONDS,
        bytes_max=ANSWER_BYTES_MAX,
    )


async def _post(
    place: tuple[str, int], key: str, path: str, body: bytes, *, seconds_max: float, bytes_max: int
) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {place[0]}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    async with asyncio.timeout(seconds_max):
        reader, writer = await asyncio.open_connection(*place)
        try:
            return await exchanged(reader, writer, head.encode() + body, bytes_max)
        finally:
            writer.close()
