"""No record, and no row that an earlier version left, stops ingest or roll-up for others."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import redis
from django.db import connection
from django.utils import timezone

from telemetry.cells import SUM_MAX, Cells, add_cells
from telemetry.emit import transfers
from telemetry.emit.transfers import TRANSFERS_MAX, Transfer
from telemetry.events import forget_old_events
from telemetry.histogram import BUCKETS
from telemetry.ingest import dead_letters, quotas
from telemetry.ingest.folder import bucket_of
from telemetry.ingest.quotas import LIVES_MAX, SHARE_OF_TOPIC_MAX, TOPICS_OF_SOURCE_MAX
from telemetry.ingest.service import Ingest
from telemetry.ingest.slowest import forget_old_transfers
from telemetry.metrics import Kind
from telemetry.models import DeadLetter, DeadLetterCount, Event, SlowTransfer, Source, Topic
from telemetry.records import FIELD, STREAM
from telemetry.shapes import SERIES_MAX, Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, LEVELS, Shapes, Stored, cells_of, copy_in, day_of, encoded
from tests.telemetry.writers import Writer, counters

pytestmark = pytest.mark.django_db

HONEST = Series(Kind.COUNTER, "test_honest_total", (("tier", "dram"),))


@pytest.fixture
def member(client: redis.Redis) -> Ingest:
    made = Ingest(client, "a")
    made.join()
    return made


@pytest.fixture
def hour() -> float:
    """The beginning of an hour that is over, so that all levels can be made of it."""
    return time.time() // 3600 * 3600 - 7200


def roll(roll_up: RollUp) -> None:
    while roll_up.advance(time.time() + 3600):
        pass


def total(topic: str, name: str, table: str) -> float:
    """What was counted of a metric, over all of its series."""
    return float(sum(cell for one, cell in rows(topic, table) if one.name == name))


def rows(topic: str, table: str) -> list[tuple[Series, Any]]:
    shapes = Shapes()
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT shape, cells FROM telemetry_{table} JOIN telemetry_topic ON id = topic "  # noqa: S608
            "WHERE name = %s",
            [topic],
        )
        found = cursor.fetchall()
    return [pair for shape, cells in found for pair in shapes.of([shape])[shape].pairs(cells_of(cells))]


def test_one_record_that_fills_a_topic_stops_no_roll_up(
    client: redis.Redis, member: Ingest, roll_up: RollUp, hour: float
) -> None:
    Writer(client, name="honest").tell({HONEST: 3}, hour)
    Writer(client, name="flood").tell(counters("test_flood_total", "tier", range(SERIES_MAX)), hour)
    member.step()
    roll(roll_up)
    for level in LEVELS:
        assert total("fleet", HONEST.name, level) == 3
        assert total("fleet", "test_flood_total", level) == SERIES_MAX


@pytest.mark.slow
def test_an_honest_fleet_of_many_series_is_rolled_up_to_the_last_one(
    client: redis.Redis, member: Ingest, roll_up: RollUp, hour: float
) -> None:
    """Thirty drivers with two hundred sessions each: nobody does anything wrong."""
    for number in range(30):
        its = range(number * 200, number * 200 + 200)
        Writer(client, name=f"job{number}").tell(counters("test_moved_total", "session", its, 2), hour)
    member.step()
    roll(roll_up)
    for level in LEVELS:
        assert total("fleet", "test_moved_total", level) == 12_000


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        (Kind.GAUGE, (1 << 52, 1 << 52, 1 << 52)),
        (Kind.GAUGE, (2.0**52, 1 << 30, 2.0**52)),
        (Kind.COUNTER, 1 << 52),
        (Kind.COUNTER, 1e308),
        (Kind.HISTOGRAM, [0.5, 3, 1 << 52]),
        (Kind.HISTOGRAM, [1e308, 3, 1]),
        (Kind.HISTOGRAM, [0.5, 3, -1]),
        (Kind.HISTOGRAM, [0.5, 0, *[(1 << 32) - 1] * BUCKETS]),
    ],
    ids=str,
)
def test_huge_numbers_cost_nobody_but_who_tells_them(
    kind: Kind, cell: Any, client: redis.Redis, member: Ingest, roll_up: RollUp, hour: float
) -> None:
    huge = {Series(kind, "test_huge", (("shard", f"s{one}"),)): cell for one in range(SERIES_MAX)}
    Writer(client, name="honest").tell({HONEST: 3}, hour)
    hostile = Writer(client, name="hostile")
    hostile.tell(huge, hour)
    hostile.tell(huge, hour + 1)
    member.step()
    roll(roll_up)
    for level in LEVELS:
        assert total("fleet", HONEST.name, level) == 3


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fresh", "10s", "1m"])
def test_a_database_that_was_poisoned_before_heals(
    level: str, client: redis.Redis, member: Ingest, roll_up: RollUp, hour: float
) -> None:
    """Rows whose series are more than fit into one, which stopped the roll-up of earlier versions."""
    bucket = bucket_of(hour)
    Writer(client, name="honest").tell({HONEST: 3}, hour)
    member.step()
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM telemetry_topic WHERE name = 'fleet'")
        (fleet,) = cursor.fetchone()
    rows = []
    for start in range(0, 5 * SERIES_MAX, SERIES_MAX):
        values = counters("test_old_total", "session", range(start, start + SERIES_MAX))
        shape = Shape(values)
        member._names.learn_shapes([shape], day_of(time.time()))
        number = member._names.number(shape)
        rows.append(Stored(fleet, number, bucket, encoded(shape.cells(values))))
    copy_in(level if level != "fresh" else FRESH, rows)
    roll(roll_up)
    assert total("fleet", HONEST.name, "1h") == 3
    assert total("fleet", "test_old_total", "1h") == 5 * SERIES_MAX


@pytest.mark.parametrize(
    "cells", [b"\xc1", b"\x93\x90\x90\x90", b""], ids=["no text", "too few", "empty"]
)
def test_a_row_that_cannot_be_read_costs_only_itself(
    cells: bytes, client: redis.Redis, member: Ingest, roll_up: RollUp, hour: float
) -> None:
    Writer(client, name="honest").tell({HONEST: 3}, hour)
    member.step()
    with connection.cursor() as cursor:
        cursor.execute("SELECT topic, shape, bucket FROM telemetry_fresh LIMIT 1")
        topic, shape, bucket = cursor.fetchone()
    copy_in(FRESH, [Stored(topic, shape, bucket, cells), Stored(topic, 999_999, bucket, cells)])
    roll(roll_up)
    for level in LEVELS:
        assert total("driver:honest", HONEST.name, level) == 3
        assert total("fleet", HONEST.name, level) == 3


def test_names_that_cannot_be_stored_are_refused(
    client: redis.Redis, member: Ingest, hour: float
) -> None:
    Writer(client, name="honest").tell({HONEST: 3}, hour)
    for text in ("a\0b", "x" * 201):
        Writer(client, name=text).tell({HONEST: 1}, hour)
        Writer(client, name="labels").tell({HONEST._replace(labels=(("org", text),)): 1}, hour)
        Writer(client, name="names").tell({HONEST._replace(name=text): 1}, hour)
    member.step()
    assert member.counts.records["written"] == 1
    assert total("fleet", HONEST.name, "fresh") == 3


def test_a_record_that_the_database_refuses_is_taken_aside_and_the_others_are_written(
    client: redis.Redis, member: Ingest, hour: float
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "ALTER TABLE telemetry_source ADD CONSTRAINT refused CHECK (name NOT LIKE '%cursed%')"
        )
    for number in range(20):
        Writer(client, name=f"job{number}").tell({HONEST: 3}, hour)
        if number == 7:
            Writer(client, name="cursed").tell({HONEST: 1}, hour)
    member.step()
    assert total("fleet", HONEST.name, "fresh") == 60
    assert member.counts.records["written"] == 20
    assert client.xlen(STREAM) == 0
    assert DeadLetter.objects.get().cause == "refused_by_database"
    assert DeadLetter.objects.get().source == "driver:cursed"


def test_what_is_set_aside_is_counted_and_can_be_looked_at(
    client: redis.Redis, member: Ingest, hour: float
) -> None:
    writer = Writer(client, name="job7")
    for _ in range(10):
        client.xadd(STREAM, {FIELD: writer.record(at=5.0)})
    client.xadd(STREAM, {FIELD: b"\xc1\x00nonsense"})
    client.xadd(STREAM, {FIELD: writer.record(version="a\0b")})
    client.xadd(STREAM, {"x": "y"})
    member.step()
    counted = {(one.cause, one.source): one.count for one in DeadLetterCount.objects.all()}
    assert counted == {("untimely", "driver:job7"): 10, ("malformed", "unknown"): 3}
    untimely = DeadLetter.objects.filter(cause="untimely")
    assert untimely.count() == dead_letters.LETTERS_ALIKE_MAX
    assert '"job7"' in untimely[0].excerpt
    assert "it is of 5" in untimely[0].reason
    malformed = [one.excerpt for one in DeadLetter.objects.filter(cause="malformed").order_by("pk")]
    assert [one[:9] for one in malformed] == ["hex c1 00", '["driver@', ""]
    assert "a\\u0000b" in malformed[1]
    assert member.counts.dead == {"untimely": 10, "malformed": 3}


def test_dead_letters_are_bounded_and_go(
    client: redis.Redis, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "LETTERS_MAX", 20)
    monkeypatch.setattr(dead_letters, "LETTERS_OF_SOURCE_MAX", 4)
    monkeypatch.setattr(dead_letters, "SOURCES_A_DAY_MAX", 6)
    for number in range(30):
        for _ in range(3):
            Writer(client, name=f"job{number % 10}").tell({}, at=7.0)
        member.step()
    assert DeadLetter.objects.count() == 20
    counted = dict(DeadLetterCount.objects.values_list("source", "count"))
    assert len(counted) == 7
    assert counted["other"] == 36
    assert sum(counted.values()) == 90
    for _ in range(3):
        for _ in range(3):
            Writer(client, name="job9").tell({}, at=7.0)
        member.step()
    assert DeadLetter.objects.filter(source="driver:job9").count() == 4
    there = DeadLetter.objects.count()
    assert there <= 20
    assert dead_letters.forget_old_letters(timezone.now() + timedelta(days=8)) == there
    assert dead_letters.forget_old_letters(timezone.now() + timedelta(days=32)) == 7


@pytest.mark.slow
def test_a_source_that_floods_a_topic_leaves_room_for_others(
    client: redis.Redis, member: Ingest, roll_up: RollUp, hour: float
) -> None:
    """It names new series with each record: in the end its own numbers are refused, and no others."""
    flood = Writer(client, name="flood")
    now = hour + 7200  # it stands still, since quotas begin anew with each hour
    for number in range(80):
        its = range(number * SERIES_MAX, (number + 1) * SERIES_MAX)
        flood.tell(counters("test_flood_total", "tier", its), hour)
        if number % 20 == 0:
            moved = counters("test_moved_total", "tier", range(number, number + 20))
            Writer(client, name=f"job{number}").tell(moved, hour)
        member.done(member.write(member.streams.read(), now))
    roll(roll_up)
    found = rows("fleet", "1h")
    assert {one for one, _ in found if one.name == "test_moved_total"} == set(
        counters("test_moved_total", "tier", range(80))
    )
    assert total("fleet", "test_flood_total", "1h") == 64 * SERIES_MAX
    assert len(found) == SHARE_OF_TOPIC_MAX + 80 + 1
    assert member.counts.dead["over_quota_shapes"] == 80 - 64
    assert member.counts.dead["over_quota_series"] == 64 * SERIES_MAX - SHARE_OF_TOPIC_MAX
    assert set(DeadLetterCount.objects.values_list("source", flat=True)) == {"driver:flood"}


def test_a_source_that_names_ever_new_orgs_makes_few_topics(
    client: redis.Redis, member: Ingest, hour: float
) -> None:
    Writer(client, name="flood").tell(counters("test_flood_total", "org", range(SERIES_MAX)), hour)
    Writer(client, name="honest").tell(counters("test_moved_total", "org", range(9000, 9010)), hour)
    member.step()
    topics = set(Topic.objects.values_list("name", flat=True))
    assert sum(name.startswith("org:") for name in topics) == TOPICS_OF_SOURCE_MAX - 1 + 10
    assert {f"org:org-{number}" for number in range(9000, 9010)} < topics


def test_sums_that_are_too_large_to_store_are_stored_as_nearly() -> None:
    huge = Cells([1 << 70], [(1 << 70, 1 << 70, 5)], [[0.5, 3, 1 << 70, 2], []])
    kept = cells_of(encoded(huge))
    assert kept == Cells([2.0**70], [(2.0**70, SUM_MAX, 5)], [[0.5, 3, SUM_MAX, 2], []])
    assert encoded(add_cells([kept] * 5))


def test_who_starts_again_and_again_costs_nobody_but_itself(client: redis.Redis, member: Ingest) -> None:
    restless = Writer(client, name="restless")
    for life in range(LIVES_MAX + 5):
        restless.source = f"driver@host/{life}"
        client.xadd(STREAM, {FIELD: restless.record()})
    restless.source = "driver@host/0"
    client.xadd(STREAM, {FIELD: restless.record()})
    Writer(client, name="honest").tell({HONEST: 3})
    member.step()
    assert member.counts.records == {"written": LIVES_MAX + 2, "over_quota_lives": 5}
    assert Source.objects.count() == LIVES_MAX + 1
    assert Event.objects.filter(kind="node.started").count() == LIVES_MAX + 1


def test_who_reports_too_many_slowest_transfers_fills_no_table(
    client: redis.Redis, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "TRANSFERS_OF_SOURCE_MAX", 100)
    flood, honest = Writer(client, name="flood"), Writer(client, name="honest")
    many = transfers.encode([transfer(at=time.time())] * TRANSFERS_MAX)
    for _ in range(2):
        for writer in (flood, flood, honest):
            client.xadd(STREAM, {FIELD: writer.record(), transfers.FIELD: many})
        member.step()
    assert member.counts.records == {"written": 6}
    assert SlowTransfer.objects.filter(driver="flood").count() == 100
    assert SlowTransfer.objects.filter(driver="honest").count() == 100
    assert member.counts.dead == {"over_quota_transfers": 6 * TRANSFERS_MAX - 200}


def test_what_is_dated_ahead_is_not_stored_for_ever(
    client: redis.Redis, member: Ingest, roll_up: RollUp
) -> None:
    writer, far = Writer(client), float(2**33 - 1)
    told = [transfer(at=at) for at in (time.time(), far, 1.0)]
    client.xadd(STREAM, {FIELD: writer.record(started_at=far), transfers.FIELD: transfers.encode(told)})
    member.step()
    assert member.counts.records == {"written": 1, "malformed_slowest": 1}
    assert "2 of 3 are of another time" in DeadLetter.objects.get().reason
    now = timezone.now() + timedelta(minutes=1)
    assert SlowTransfer.objects.count() == 1
    assert forget_old_transfers(now, 0) == 1
    assert forget_old_events(now, 0) == 1
    assert Source.objects.get().started_at < now


@pytest.mark.parametrize(
    "odd", [{"org": ""}, {"org": "A B"}, {"node": "A/B"}, {"node": "ax-1\n"}], ids=str
)
def test_transfers_of_what_can_be_no_org_or_node_are_not_stored(
    odd: dict[str, str], client: redis.Redis, member: Ingest, roll_up: RollUp
) -> None:
    told = [msgspec.structs.replace(transfer(time.time()), **odd)]
    client.xadd(STREAM, {FIELD: Writer(client).record(), transfers.FIELD: transfers.encode(told)})
    member.step()
    assert member.counts.records == {"written": 1, "malformed_slowest": 1}
    assert not SlowTransfer.objects.exists()


def transfer(at: float) -> Transfer:
    return Transfer(
        at=at,
        seconds=1.0,
        direction="out",
        org="acme",
        request="",
        stream="0.0",
        slot_first=0,
        slot_last=0,
        columns=1,
        bytes=1,
        session="",
        node="",
        tier="",
        nic_leaf="",
        link="",
    )


def test_nobody_uses_the_life_of_another(client: redis.Redis, member: Ingest, roll_up: RollUp) -> None:
    """Sequences that the other is still to use would be taken for repeated then."""
    honest, thief = Writer(client, name="honest"), Writer(client, name="thief")
    honest.tell({HONEST: 3})
    member.step()
    thief.source = honest.source
    for _ in range(3):
        thief.tell({HONEST: 100})
    member.step()
    assert member.counts.records == {"written": 1, "foreign": 3}
    assert DeadLetter.objects.values_list("source", flat=True)[0] == "driver:thief"
    honest.tell({HONEST: 4})
    thief.tell({HONEST: 100})
    member.step()
    assert member.counts.records == {"written": 2, "foreign": 4}
    assert total("driver:honest", HONEST.name, FRESH) == 7
    assert total("fleet", HONEST.name, FRESH) == 7
    assert all(honest.source not in str(event.data) for event in Event.objects.all()), "all may read it"
