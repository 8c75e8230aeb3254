"""A leader, and its Cluster Server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.db import connection

from telemetry.records import ENDPOINTS
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.leader.leaders import Leader


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as made:
        yield made


@pytest.fixture
def leader(cluster: FakeCluster, redis_url: str, db: None) -> Iterator[Leader]:
    made = Leader(cluster, redis_url)
    yield made
    made.orchestrator.stop()
    # In the transaction of a test it can't end its connection. Back in the pool that would keep the
    # lock, and a leader on another connection would wait for ever.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_unlock_all()")


@pytest.fixture
def redis_url(settings: Any) -> str:
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        for key in client.scan_iter(f"{ENDPOINTS}*"):
            client.delete(key)
    return str(settings.REDIS_URL)
