"""Asking the runner of a pod: a poll that is answered when there is something new."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from cluster_server.kubernetes.objects import RUNNER_PORT
from cluster_server.pod.runner import Asked, Report
from cluster_server.processes.manager_status import exchanged
from telemetry.decoder import Limits, decode

POLL_SECONDS: Final = 30.0
OVERDUE_SECONDS: Final = 5.0  # beyond that
ANSWER_BYTES_MAX: Final = 8 << 20  # the result of a job, in JSON that escapes it
_ANSWER: Final = Limits(ANSWER_BYTES_MAX)


async def ask(
    address: str, key: str, version: int, goal: str = "", wait_seconds: float = POLL_SECONDS
) -> Report:
    """What it reports next, later than this version, or now if it has no news for so long; the goal
    is handed on first. Raises OSError and Malformed."""
    body = msgspec.json.encode(Asked(version, wait_seconds, goal))
    raw = await _post(address, key, "/status", body, wait_seconds + OVERDUE_SECONDS)
    report = decode(raw, Report, _ANSWER)
    if report.manager:
        report.manager.check()
    return report


async def let_go(address: str, key: str) -> None:
    """Of a job whose result is stored. Raises OSError and Malformed."""
    await _post(address, key, "/done", b"", OVERDUE_SECONDS)


async def _post(address: str, key: str, path: str, body: bytes, seconds_max: float) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    async with asyncio.timeout(seconds_max):
        reader, writer = await asyncio.open_connection(address, RUNNER_PORT)
        try:
            return await exchanged(reader, writer, head.encode() + body, ANSWER_BYTES_MAX)
        finally:
            writer.close()
