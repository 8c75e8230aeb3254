"""A connection to Redis for a question or two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis

from telemetry.redis_clients import client


@contextlib.contextmanager
def connected(url: str, seconds_max: float) -> Iterator[redis.Redis]:
    """Each answer may take so long."""
    made = client(url, answer_seconds=seconds_max)
    try:
        yield made
    finally:
        made.close()
