"""Real processes of which one leads: kill -9, and another one acts, nothing twice.

How long that takes, `make bench` measures: here the machine may be busy with anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connection, transaction

from console.accounts.principal import SYSTEM
from console.beat import LOCK as BEAT
from console.workloads.leader.orchestrator import LOCK
from console.workloads.models import Instance, Workload
from telemetry.records import ENDPOINTS
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.workloads import locked, make_workload, scale
from tests.live import wait_until
from tests.processes import Process, start

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

SPEC: dict[str, Any] = {
    "cache": {"enabled": False},
    "boxes_per_replica": 0,
    "rollout": {"ready_seconds": 0},
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@contextlib.contextmanager
def processes(folder: Path, *command: str, **environment: str) -> Iterator[list[Process]]:
    """Two of a kind, over this test's database and Redis."""
    target = connection.settings_dict
    database_url = os.environ["DATABASE_URL"].replace("/tidegate?", f"/{target['NAME']}?")
    started = []
    for number in (1, 2):
        with (folder / f"log{number}").open("wb") as output:
            started.append(
                start(
                    *command,
                    environment={**os.environ, "DATABASE_URL": database_url, **environment},
                    descriptors={1: output.fileno(), 2: output.fileno()},
                    is_session=True,
                )
            )
    try:
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def holders(lock: str) -> list[int]:
    """Connections that have the lock."""
    statement = """
        SELECT pid FROM pg_locks
        WHERE locktype = 'advisory' AND granted
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND ((classid::bigint << 32) | objid::bigint) = hashtextextended(%s, 0)
    """
    with connection.cursor() as cursor:
        cursor.execute(statement, [lock])
        return [row[0] for row in cursor.fetchall()]


def leader_of(started: list[Process], lock: str) -> Process:
    """By the name that its connection has."""
    [backend] = holders(lock)
    with connection.cursor() as cursor:
        cursor.execute("SELECT application_name FROM pg_stat_activity WHERE pid = %s", [backend])
        [name] = cursor.fetchone()
    return next(one for one in started if name.endswith(f" {one.pid}"))


def test_when_the_leader_is_killed_another_one_goes_on(folder: Path) -> None:
    with (
        FakeCluster(folder / "cluster.sock") as cluster,
        redis.Redis.from_url(settings.REDIS_URL) as client,
        processes(
            folder,
            *("console.manage", "orchestrate"),
            TIDEGATE_CLUSTER_URL=f"unix://{folder / 'cluster.sock'}",
        ) as started,
    ):
        make_workload(replicas=2, **SPEC)
        wait_until("it runs", lambda: Workload.objects.get().stable_id, 60)
        key = ENDPOINTS + "example/chat-8b"
        assert client.exists(key)
        assert len(holders(LOCK)) == 1
        leader_of(started, LOCK).kill()
        with transaction.atomic():
            scale(SYSTEM, locked(SYSTEM), 3)
        wait_until("another one acts", lambda: len(cluster.statuses()) == 3, 60)
        assert len(holders(LOCK)) == 1
        assert client.exists(key)
        names = Instance.objects.filter(ended_at=None).values_list("ordinal", flat=True)
        assert sorted(names) == [0, 1, 2]


def test_of_several_beats_one_fires_and_another_takes_over(folder: Path) -> None:
    with (
        redis.Redis.from_url(settings.REDIS_URL) as client,
        processes(
            folder,
            *("celery", "--quiet", "-A", "console.celery", "beat", "--pidfile="),
            DJANGO_SETTINGS_MODULE="console.settings_lean",
        ) as started,
    ):
        client.flushdb()
        wait_until("one fires", lambda: len(_senders(client)) >= 4, 60)
        assert len(holders(BEAT)) == 1
        leader = leader_of(started, BEAT)
        assert set(_senders(client)) == {leader.pid}
        leader.kill()
        leader.wait(30)
        client.flushdb()
        wait_until("another one fires", lambda: _senders(client), 60)
        [other] = [one.pid for one in started if one is not leader]
        assert set(_senders(client)) == {other}


def _senders(client: redis.Redis) -> list[int]:
    """Of each message that waits for a worker, the process that has sent it."""
    lists = [name for name in client.scan_iter("tidegate:celery:*") if client.type(name) == b"list"]
    raws: Any = [raw for name in lists for raw in client.lrange(name, 0, -1)]
    origins = [json.loads(raw)["headers"]["origin"] for raw in raws]
    return [int(origin.removeprefix("gen").partition("@")[0]) for origin in origins]
