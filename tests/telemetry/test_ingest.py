"""From an emitter through a real Redis into a real PostgreSQL, once each."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from django.conf import settings
from django.db import DatabaseError

from telemetry import ingest as module
from telemetry.emitter import Emitter
from telemetry.ingest import Ingest
from telemetry.models import Source
from telemetry.records import GROUP, STREAM, Field, Record

pytestmark = pytest.mark.django_db


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(settings.REDIS_URL, decode_responses=True)
    client.delete(STREAM)
    yield client
    client.delete(STREAM)
    client.close()


def joined(client: redis.Redis, name: str = "a") -> Ingest:
    member = Ingest(client, name)
    member.join()
    return member


@pytest.fixture
def emitter() -> Iterator[Emitter]:
    emitter = Emitter(settings.REDIS_URL, "web", "0.1.0")
    yield emitter
    emitter._redis.close()


def test_what_is_emitted_is_known_after_a_step(client: redis.Redis, emitter: Emitter) -> None:
    emitter.emit(time.time())
    emitter.emit(time.time())
    assert joined(client).step() == 2
    source = Source.objects.get()
    assert (source.kind, source.sequence) == ("web", 2)


def test_a_batch_that_was_not_acknowledged_is_read_again_and_counts_once(
    client: redis.Redis, emitter: Emitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_MS_BEFORE_TAKEN_OVER", 0)
    emitter.emit(time.time())
    killed = joined(client, "killed")
    killed._write(killed._fresh())  # and then it dies, before it acknowledges
    survivor = joined(client, "survivor")
    assert survivor.step() == 1
    assert (survivor.counts.written, survivor.counts.repeated) == (0, 1)
    assert client.xpending(STREAM, GROUP)["pending"] == 0


def test_a_batch_that_could_not_be_written_is_not_acknowledged(
    client: redis.Redis, emitter: Emitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitter.emit(time.time())
    member = joined(client)

    def full(*_: object) -> int:
        raise DatabaseError("disk full")

    monkeypatch.setattr(module, "_upsert", full)
    with pytest.raises(DatabaseError):
        member.step()
    assert client.xpending(STREAM, GROUP)["pending"] == 1


def test_an_older_record_never_overwrites_a_newer_one(client: redis.Redis, emitter: Emitter) -> None:
    member = joined(client)
    for sequence in (5, 3):
        emitter.sequence = sequence - 1
        emitter.emit(time.time())
        member.step()
    assert Source.objects.get().sequence == 5
    assert member.counts.repeated == 1


@pytest.mark.parametrize(
    "fields",
    [{"x": "y"}, {"record": "{"}, {"record": "[]"}, {"record": '{"source": "a"}'}],
)
def test_a_malformed_record_is_counted_and_stops_nothing(
    fields: dict[Field, Field], client: redis.Redis, emitter: Emitter
) -> None:
    client.xadd(STREAM, {**fields})
    emitter.emit(time.time())
    member = joined(client)
    member.step()
    assert (member.counts.malformed, member.counts.written) == (1, 1)


def test_the_group_may_be_joined_again(client: redis.Redis) -> None:
    joined(client)
    joined(client)


def test_without_redis_the_emitter_drops_and_counts() -> None:
    emitter = Emitter("redis://127.0.0.1:1/0", "web", "0.1.0")
    assert emitter.emit(time.time()) is False
    assert emitter.dropped == 1
    emitter._redis.close()


def test_records_survive_writing_and_reading() -> None:
    record = Record("a", 1, "web", "0.1.0", "host", 7, 1.5, 2.5)
    assert Record.decode(dict(record.encode())) == record  # type: ignore[arg-type]
