"""From writers to ingest, after all that was in Redis is gone: groups, streams, shapes and users come
right by themselves, and no number is lost that was told afterwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from django.utils import timezone

from console.fleet.membership.telemetry_users import keep_users
from console.fleet.models import Driver
from console.stack import redis as redis_server
from console.stack import redis_users
from telemetry.credentials import own_url
from telemetry.emit.emitter import Emitter
from telemetry.ingest import streams
from telemetry.ingest.service import Ingest
from telemetry.management.commands.ingest import Reading
from telemetry.metrics import Catalog, Sink
from telemetry.models import Source
from tests.embedded import running
from tests.telemetry.sums import sums

pytestmark = pytest.mark.django_db

TOKEN = "token of job1"
CATALOG = Catalog()
COLUMNS = CATALOG.counter("test_columns_total", "Columns.", "shard")


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> redis_server.RedisServer:
    """As in production, and what it holds is gone when it stops."""
    users = (*redis_users.TELEMETRY, redis_users.OF_EARLIER_VERSIONS)
    home = tmp_path_factory.mktemp("redis") / "t"
    return redis_server.prepare(home, users=users, durable=False, strict=True)


@contextlib.contextmanager
def is_up(server: redis_server.RedisServer) -> Iterator[redis.Redis]:
    with (
        running(server, server.home.parent / "log"),
        redis.Redis.from_url(server.url) as admin,
    ):
        yield admin


class Process:
    """Counts one more with each record."""

    def __init__(self, url: str, kind: str, name: str) -> None:
        self.columns = 0
        self.emitter = Emitter(url, kind, "1", name=name, collect=self._collect)

    def _collect(self, into: Sink) -> None:
        self.columns += 1
        into.put(COLUMNS, [({"shard": "s0"}, self.columns)])

    def tell_all_again(self) -> None:
        """As after TOLD_SECONDS."""
        self.emitter._reported.clear()


@dataclass
class Fleet:
    """One process with a user of its own, one of the console, and one of an earlier version."""

    own: Process
    console: Process
    shared: Process

    def all(self) -> tuple[Process, ...]:
        return self.own, self.console, self.shared

    def tell(self, times: int = 1) -> None:
        for one in self.all():
            for _ in range(times):
                assert one.emitter.emit(time.time())


@pytest.fixture
def fleet(server: redis_server.RedisServer, settings: Any) -> Iterator[Fleet]:
    settings.REGISTRAR_URL = server.url_of("registrar")
    Driver.objects.create(
        name="job1",
        control_token=TOKEN,
        control_url="http://127.0.0.1:1",
        heartbeat_sha256=b"x" * 32,
        joined_at=timezone.now(),
    )
    made = Fleet(
        Process(own_url(server.url_of("own", ""), "driver:job1", TOKEN), "driver", "job1"),
        Process(server.url_of("console"), "web", "host"),
        Process(server.url_of("shared"), "driver", "job2"),
    )
    yield made
    for one in made.all():
        one.emitter._redis.close()


@pytest.fixture
def reading(server: redis_server.RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    monkeypatch.setattr(streams, "BLOCK_MS", 1)
    monkeypatch.setattr(streams, "LOOK_SECONDS", 0.0)
    client = redis.Redis.from_url(server.url_of("ingest"), driver_info=None)
    yield Reading(Ingest(client, "a"))
    client.close()


def read(reading: Reading) -> None:
    """Some rounds, of which the first may fail."""
    for _ in range(6):
        with contextlib.suppress(redis.RedisError):
            reading.round()


def counted(topic: str) -> float:
    return sums("fresh").get(topic, {}).get("test_columns_total,shard=s0", 0)


def missing() -> dict[str, int]:
    return dict(Source.objects.values_list("topic", "missing"))


def test_numbers_flow_on_after_everything_is_flushed(
    server: redis_server.RedisServer, fleet: Fleet, reading: Reading
) -> None:
    with is_up(server) as admin:
        keep_users()
        fleet.tell(3)
        read(reading)
        admin.flushall()
        fleet.tell(3)
        read(reading)
        fleet.tell(3)
        read(reading)
    assert [counted(topic) for topic in ("driver:job1", "web:host", "driver:job2")] == [9, 9, 9]
    assert missing() == {"driver:job1": 0, "web:host": 0, "driver:job2": 0}


def test_shapes_that_nobody_has_read_before_they_were_flushed_are_told_again(
    server: redis_server.RedisServer, fleet: Fleet, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers do not notice. Records in streams of one's own wait; others are refused until then."""
    with is_up(server) as admin:
        keep_users()
        read(reading)
        fleet.tell()
        admin.flushall()
        fleet.tell(2)
        read(reading)
        assert not Source.objects.exists()
        for one in fleet.all():
            one.tell_all_again()
        fleet.tell()
        read(reading)
        monkeypatch.setattr(streams, "IDLE_MS_BEFORE_TAKEN_OVER", 0)
        read(reading)
    assert [counted(topic) for topic in ("driver:job1", "web:host", "driver:job2")] == [3, 3, 1]


def test_a_redis_that_was_started_without_its_data_is_as_before(
    server: redis_server.RedisServer, fleet: Fleet, reading: Reading
) -> None:
    with is_up(server):
        keep_users()
        fleet.tell(2)
        read(reading)
    for one in fleet.all():
        assert not one.emitter.emit(time.time())
    with is_up(server):
        assert not fleet.own.emitter.emit(time.time()), "nobody has made its user yet"
        assert keep_users() == 1
        fleet.tell()
        read(reading)
    assert [counted(topic) for topic in ("driver:job1", "web:host", "driver:job2")] == [5, 4, 4]
    assert missing() == {"driver:job1": 0, "web:host": 0, "driver:job2": 0}
