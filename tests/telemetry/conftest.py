"""Redis of the worker, emptied, and a roll-up."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from django.conf import settings

from telemetry.store.rollup import RollUp


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


@pytest.fixture
def roll_up() -> RollUp:
    made = RollUp()
    made.tend_days(time.time())
    return made
