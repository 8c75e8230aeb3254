"""From an emitter through a real Redis into a real PostgreSQL, once each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, cast

import msgspec
import pytest
import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.utils import timezone

from telemetry.cells import Cells
from telemetry.emit import transfers
from telemetry.emit.deltas import Collect
from telemetry.emit.emitter import Emitter
from telemetry.histogram import Histogram
from telemetry.ingest import service as module
from telemetry.ingest import streams
from telemetry.ingest.folder import bucket_of
from telemetry.ingest.service import Ingest
from telemetry.ingest.slowest import forget_old_transfers
from telemetry.management.commands.ingest import Reading
from telemetry.metrics import Catalog, Sink
from telemetry.models import Event, SlowTransfer, Source
from telemetry.records import FIELD, GROUP, LAST_FIELD, OWN_STREAM, STREAM, Record, decode
from telemetry.shapes import Series
from telemetry.store import rollup
from telemetry.store.rollup import RollUp, days_kept
from telemetry.store.storage import LEVELS
from tests.swdriver_shim.transfers import transfer
from tests.telemetry.sums import sums

pytestmark = pytest.mark.django_db

CATALOG = Catalog()
COLUMNS = CATALOG.counter("test_columns_total", "Columns.", "org")
SLOTS = CATALOG.gauge("test_slots", "Slots.")
EVICT = CATALOG.histogram("test_evict_seconds", "Evicts.", "shard")
OWN = f"{OWN_STREAM}node:ax-1"


class Numbers:
    """What a process counts."""

    def __init__(self) -> None:
        self.columns = {"acme": 0, "globex": 0}
        self.evict = Histogram()

    def collect(self, into: Sink) -> None:
        into.put(COLUMNS, [({"org": org}, count) for org, count in self.columns.items()])
        into.put(SLOTS, [({}, 7)])
        into.put(EVICT, [({"shard": "s0"}, self.evict)])

    def work(self) -> None:
        self.columns["acme"] += 3
        self.columns["globex"] += 1
        self.evict.record(0.001)


def joined(client: redis.Redis, name: str = "a") -> Ingest:
    member = Ingest(client, name)
    member.join()
    return member


def emitter_of(collect: Collect | None = None, name: str = "ax-1") -> Emitter:
    return Emitter(settings.REDIS_URL, "agent", "0.1.0", name=name, collect=collect)


@pytest.fixture
def emitter() -> Iterator[Emitter]:
    emitter = emitter_of()
    yield emitter
    emitter._redis.close()


def test_what_is_emitted_is_known_after_a_step(client: redis.Redis, emitter: Emitter) -> None:
    emitter.emit(time.time())
    emitter.emit(time.time())
    assert joined(client).step() == 2
    source = Source.objects.get()
    assert (source.kind, source.topic, source.sequence) == ("agent", "node:ax-1", 2)
    assert client.xlen(STREAM) == 0


def test_a_process_that_ended_as_it_should_is_told_from_one_that_fell_silent(
    client: redis.Redis,
) -> None:
    emitter = Emitter(settings.REDIS_URL, "web", "1")
    emitter.emit(time.time())
    emitter.start().stop()
    silent = Emitter(settings.REDIS_URL, "worker", "1")
    silent.emit(time.time())
    silent._redis.close()
    entries = cast("list[tuple[bytes, dict[Any, Any]]]", client.xrange(STREAM))
    member = joined(client)
    member.step()
    assert set(Source.objects.filter(ended_at=None).values_list("kind")) == {("worker",)}
    client.xadd(STREAM, entries[0][1])  # delivered once more, after the last
    member.step()
    assert Source.objects.get(kind="web").ended_at


def test_a_process_that_goes_on_after_its_last_record_has_not_ended(client: redis.Redis) -> None:
    client.xadd(STREAM, {FIELD: record(sequence=1), LAST_FIELD: b"1"})
    member = joined(client)
    member.step()
    assert Source.objects.get().ended_at
    client.xadd(STREAM, {FIELD: record(sequence=2)})
    member.step()
    assert Source.objects.get().ended_at is None


def test_the_slowest_transfers_come_with_a_record_and_count_as_often(client: redis.Redis) -> None:
    told = [[transfer(0.2, at=time.time())], [], [transfer(0.1, at=time.time(), org="globex")]]
    driver = Emitter(settings.REDIS_URL, "driver", "1", name="job7", slowest=lambda: told.pop(0))
    now = bucket_of(time.time())
    for second in (now, now + 5, now + 10, now + 20):  # the second one is of the same interval
        driver.emit(second + 0.999)
    driver._redis.close()
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(STREAM))
    client.xadd(STREAM, cast("dict[Any, Any]", entries[0][1]))  # delivered once more
    assert joined(client).step() == 5
    found = SlowTransfer.objects.order_by("pk")
    assert [(one.driver, one.org, one.seconds, one.node) for one in found] == [
        ("job7", "acme", 0.2, "ax-1"),
        ("job7", "globex", 0.1, "ax-1"),
    ]
    at = datetime.fromtimestamp(now, UTC)
    assert forget_old_transfers(at + timedelta(hours=3), 4) == 0
    assert forget_old_transfers(at + timedelta(hours=5), 4) == 2


def test_slowest_transfers_that_are_malformed_cost_nothing_but_themselves(
    client: redis.Redis, emitter: Emitter
) -> None:
    emitter.emit(time.time())
    [(_, fields)] = cast("list[tuple[bytes, dict[Any, Any]]]", client.xrange(STREAM))
    client.delete(STREAM)
    client.xadd(STREAM, {**fields, transfers.FIELD: b"nonsense"})
    member = joined(client)
    member.step()
    assert member.counts.records == {"written": 1, "malformed_slowest": 1}
    assert not SlowTransfer.objects.exists()


def test_numbers_are_told_of_the_node_of_each_org_and_of_the_fleet(
    client: redis.Redis, roll_up: RollUp
) -> None:
    one, other = Numbers(), Numbers()
    emitters = [emitter_of(one.collect, "ax-1"), emitter_of(other.collect, "ax-2")]
    for second in range(3):
        one.work()
        if second:
            other.work()
        for emitter in emitters:
            emitter.emit(time.time() + second)
    joined(client).step()
    fresh = sums("fresh")
    assert fresh["node:ax-1"] == {
        "test_columns_total,org=acme": 9,
        "test_columns_total,org=globex": 3,
        "test_evict_seconds,shard=s0": 3,
    }
    assert fresh["org:acme"] == {"test_columns_total": 15}
    assert fresh["org:globex"] == {"test_columns_total": 5}
    assert fresh["fleet"] == {"test_columns_total": 20, "test_evict_seconds": 5}


def test_roll_ups_have_the_same_sums_level_by_level(client: redis.Redis, roll_up: RollUp) -> None:
    numbers, now = Numbers(), time.time() // 3600 * 3600 - 7200
    emitter, member = emitter_of(numbers.collect), joined(client)
    for second in range(10, 7010, 70):
        numbers.work()
        emitter.emit(now + second)
    member.step()
    expected = sums("fresh")
    assert expected["org:acme"] == {"test_columns_total": 300}
    while roll_up.advance(now + 7210):
        pass
    assert sums("fresh") == {}
    for level in LEVELS:
        assert sums(level) == expected, level
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM telemetry_1h")
        assert cursor.fetchone() == (2 * 4,)  # hours x topics


def test_what_comes_late_is_added_to_every_level(client: redis.Redis, roll_up: RollUp) -> None:
    now = time.time() // 3600 * 3600 - 7200
    early, late, member = Numbers(), Numbers(), joined(client)
    for numbers, name in ((early, "ax-1"), (late, "ax-2")):
        numbers.work()
        emitter_of(numbers.collect, name).emit(now + 5)
        member.step()
        while roll_up.advance(now + 7210):
            pass
    for level in LEVELS:
        assert sums(level)["fleet"] == {"test_columns_total": 8, "test_evict_seconds": 2}


def test_a_batch_that_was_not_acknowledged_is_read_again_and_counts_once(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "IDLE_MS_BEFORE_TAKEN_OVER", 0)
    numbers = Numbers()
    numbers.work()
    emitter_of(numbers.collect).emit(time.time())
    killed = joined(client, "killed")
    killed.write(killed.streams.read(), time.time())  # and then it dies, before it acknowledges
    before = sums("fresh")
    survivor = joined(client, "survivor")
    assert survivor.step() == 1
    assert survivor.counts.records == {"repeated": 1}
    assert client.xpending(STREAM, GROUP)["pending"] == 0
    assert sums("fresh") == before


def test_a_batch_that_could_not_be_written_leaves_nothing_and_is_not_acknowledged(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers()
    numbers.work()
    emitter_of(numbers.collect).emit(time.time())
    member = joined(client)

    def full(*_: object) -> None:
        raise DatabaseError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "copy_in", full)
        with pytest.raises(DatabaseError):
            member.step()
    assert client.xpending(STREAM, GROUP)["pending"] == 1
    assert not Source.objects.exists()
    monkeypatch.setattr(streams, "IDLE_MS_BEFORE_TAKEN_OVER", 0)
    assert member.step() == 1
    assert sums("fresh")["org:acme"] == {"test_columns_total": 3}


def test_records_count_once_in_whatever_order_they_come(client: redis.Redis) -> None:
    """As where several members read, and one of them is slow."""
    numbers, emitter, member = Numbers(), None, joined(client)
    emitter = emitter_of(numbers.collect)
    for _ in range(4):
        numbers.work()
        emitter.emit(time.time())
    entries: Any = client.xrange(STREAM)
    client.xtrim(STREAM, maxlen=0, approximate=False)
    client.xgroup_setid(STREAM, GROUP, "$")
    for place in (3, 1, 1, 3, 0):
        client.xadd(STREAM, entries[place][1])
        member.step()
    assert member.counts.records == {"written": 3, "repeated": 2}
    source = Source.objects.get()
    assert (source.sequence, source.missing) == (4, 1)
    client.xadd(STREAM, entries[2][1])
    member.step()
    assert Source.objects.get().missing == 0
    assert sums("fresh")["org:acme"] == {"test_columns_total": 12}


def record(**changes: object) -> bytes:
    values: dict[str, object] = {
        "source": "agent@host/1-x",
        "sequence": 1,
        "kind": "agent",
        "name": "ax-1",
        "version": "1",
        "host": "host",
        "process_id": 1,
        "started_at": time.time(),
        "at": time.time(),
        "shape": b"",
        "cells": [[], [], []],
        **changes,
    }
    return msgspec.msgpack.encode(list(values.values()))


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"sequence": 0}, "malformed"),
        ({"kind": "a\0b"}, "malformed"),
        ({"cells": [[], []]}, "malformed"),
        ({"cells": [[float("nan")], [], []]}, "malformed"),
        ({"cells": [[1 << 60], [], []]}, "malformed"),
        ({"cells": [[], [[1, -1, 1]], []]}, "malformed"),
        ({"cells": [[], [], [[0.1, 105, 1, 2]]]}, "malformed"),
        ({"cells": [[], [], [[0.1, 3, 1.5]]]}, "malformed"),
        ({"at": 4e9}, "untimely"),
        ({"at": 5.0}, "untimely"),
        ({"at": float("nan")}, "malformed"),
        ({"shape": b"x" * 16}, "unknown_shape"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_counted_and_stops_nothing(
    changes: dict[str, object], outcome: str, client: redis.Redis, emitter: Emitter
) -> None:
    client.xadd(STREAM, {FIELD: record(**changes)})
    client.xadd(STREAM, {FIELD: b"\xc1"})
    client.xadd(STREAM, {"x": "y"})
    emitter.emit(time.time())
    member = joined(client)
    member.step()
    assert member.counts.records["written"] == 1
    assert member.counts.records[outcome] == (3 if outcome == "malformed" else 1)
    assert client.xlen(STREAM) == 0


def test_a_process_whose_clock_is_ahead_was_heard_now(client: redis.Redis) -> None:
    """Others are compared with the newest report: they would seem to have fallen silent."""
    emitter = emitter_of()
    emitter.emit(time.time() + 90)
    joined(client).step()
    assert Source.objects.get().seen_at <= timezone.now()


def test_a_record_with_fewer_numbers_than_its_shape_is_malformed(client: redis.Redis) -> None:
    emitter = emitter_of(Numbers().collect)
    emitter.emit(time.time())
    keys: Any = client.keys("*shape*")
    client.xadd(STREAM, {FIELD: record(shape=bytes.fromhex(keys[0].decode()[-32:]))})
    member = joined(client)
    member.step()
    assert member.counts.records == {"written": 1, "malformed": 1}


def test_a_node_that_was_started_is_an_event_once_in_each_of_its_lives(client: redis.Redis) -> None:
    member = joined(client)
    for _ in range(2):
        life = emitter_of()
        for _ in range(2):
            life.emit(time.time())
            member.step()
        life._redis.close()
    Emitter(settings.REDIS_URL, "web", "0.1.0").emit(time.time())
    member.step()
    told = [(event.kind, event.topics, event.sentence) for event in Event.objects.order_by("pk")]
    assert told == [("node.started", ["node:ax-1", "fleet"], "Agent ax-1 was started, 0.1.0.")] * 2


def test_members_that_are_gone_are_forgotten_with_nothing_that_they_left(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone-1", "gone-2", "killed"):
        member = joined(client, name)
        emitter = emitter_of()
        emitter.emit(time.time())
        emitter._redis.close()
        if name == "killed":
            assert len(member.streams.read()) == 1
        else:
            assert member.step() == 1

    def members() -> set[bytes]:
        return {one["name"] for one in client.xinfo_consumers(STREAM, GROUP)}

    assert members() == {b"gone-1", b"gone-2", b"killed"}
    monkeypatch.setattr(streams, "MEMBER_IDLE_MS_MAX", -1)
    heir = joined(client, "heir")
    assert members() == {b"killed"}
    monkeypatch.setattr(streams, "IDLE_MS_BEFORE_TAKEN_OVER", 0)
    assert heir.step() == 1


def test_the_group_may_be_joined_again(client: redis.Redis) -> None:
    joined(client)
    joined(client)


def lose_the_groups(client: redis.Redis) -> None:
    for name in (STREAM, OWN):
        client.xgroup_destroy(name, GROUP)


def empty(client: redis.Redis) -> None:
    client.flushdb()


@pytest.mark.parametrize("lose", [lose_the_groups, empty])
def test_numbers_flow_again_after_redis_has_lost_its_groups(
    lose: Callable[[redis.Redis], None], client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after FLUSHALL, a failover or a restart without data. The round that notices it fails."""
    monkeypatch.setattr(streams, "BLOCK_MS", 1)
    member = Ingest(client, "a")
    reading = Reading(member)

    def tell_and_read() -> None:
        client.xadd(STREAM, {FIELD: record(source="agent@host/shared", sequence=next(numbers))})
        client.xadd(OWN, {FIELD: record(source="agent@host/own", sequence=next(numbers))})
        for _ in range(2):
            with contextlib.suppress(redis.ResponseError):
                reading.round()

    numbers = count(1)
    tell_and_read()
    lose(client)
    tell_and_read()
    tell_and_read()
    assert member.counts.records == {"written": 6}
    assert client.xlen(STREAM) == client.xlen(OWN) == 0


def test_a_process_that_is_removed_with_its_stream_stops_no_round(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks, as when a workload has one replica less."""
    monkeypatch.setattr(streams, "BLOCK_MS", 1)
    client.xadd(OWN, {FIELD: record(source="agent@host/own", sequence=1)})
    member = Ingest(client, "a")
    reading = Reading(member)
    reading.round()
    for claims in (False, True):  # the stream is missed by what is new, and by what was left behind
        client.xadd(OWN, {FIELD: record(source="agent@host/own", sequence=2)})
        member.join()
        client.delete(OWN)
        client.xadd(STREAM, {FIELD: record(source="agent@host/shared", sequence=1 + claims)})
        member.streams._claimed_at = 0.0 if claims else time.monotonic()
        reading.round()
        reading.round()
    assert member.counts.records == {"written": 3}


def test_records_survive_writing_and_reading() -> None:
    written = Record("a", 1, "web", "w", "0.1.0", "host", 7, 1.5, 2.5, b"", Cells([1], [], []))
    assert decode({FIELD: written.encode()}).encode() == written.encode()


def test_days_are_made_ahead_and_dropped_when_they_are_over(roll_up: RollUp) -> None:
    def days(level: str) -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_inherits WHERE inhparent = %s::regclass", [f"telemetry_{level}"]
            )
            return int(cursor.fetchone()[0])

    assert days("10s") == rollup.DAYS_LATE + 1 + rollup.DAYS_AHEAD
    roll_up.tend_days(time.time() + 5 * 86_400)
    kept = days_kept()["10s"]
    assert days("10s") == rollup.DAYS_AHEAD + 1 + kept - 1
    assert days("1h") > days("10s")


def test_what_nobody_rolled_up_for_days_is_rolled_up_all_the_same(
    client: redis.Redis, roll_up: RollUp
) -> None:
    numbers = Numbers()
    numbers.work()
    emitter_of(numbers.collect).emit(time.time())
    joined(client).step()
    later = time.time() + 10 * 86_400
    roll_up.tend_days(later)
    while roll_up.advance(later):
        pass
    for level in LEVELS:
        assert sums(level)["fleet"] == {"test_columns_total": 4, "test_evict_seconds": 1}


def test_series_of_one_place_are_no_series_of_the_fleet() -> None:
    from telemetry.metrics import Kind
    from telemetry.topics import wider

    one = Series(Kind.COUNTER, "x_total", (("org", "acme"), ("shard", "s0"), ("tier", "dram")))
    bare = one._replace(labels=(("tier", "dram"),))
    assert wider(one) == [("fleet", bare), ("org:acme", bare)]
