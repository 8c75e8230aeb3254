"""A connection to Redis for a question or two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis


@contextlib.contextmanager
def connected(url: str, seconds_max: float) -> Iterator[redis.Redis]:
    """Each answer may take so long. Redis is not told what we are, which not every user may."""
    client = redis.Redis.from_url(
        url, socket_timeout=seconds_max, socket_connect_timeout=seconds_max, driver_info=None
    )
    try:
        yield client
    finally:
        client.close()
