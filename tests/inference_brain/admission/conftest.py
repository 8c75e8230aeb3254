"""Brains that share the worker's Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from django.conf import settings

from tests.inference_brain.admission.brains import World


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(settings.REDIS_URL)
    yield client
    client.close()


@pytest.fixture
def world(client: redis.Redis) -> World:
    return World(client)
