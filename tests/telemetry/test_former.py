"""What has a name that something else had before begins without that one's numbers."""

from __future__ import annotations

import time
from datetime import timedelta

import psycopg
import pytest
import redis
from django.db import OperationalError, connection, transaction
from django.utils import timezone

from telemetry.emit import transfers
from telemetry.ingest.folder import bucket_of
from telemetry.ingest.service import Ingest
from telemetry.metrics import Kind
from telemetry.models import FormerTopic, SlowTransfer
from telemetry.records import BEHIND_SECONDS_MAX, FIELD, LATE_SECONDS_MAX, STREAM
from telemetry.shapes import Series
from telemetry.store.former import free_topic
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, LEVELS
from tests.swdriver_shim.transfers import transfer
from tests.telemetry.sums import sums
from tests.telemetry.writers import Writer

pytestmark = pytest.mark.django_db

NUMBERS = {
    Series(Kind.COUNTER, "test_hits_total", (("org", org), ("session", session))): 3
    for org, session in (("acme", "chat"), ("globex", "code"))
}


@pytest.mark.parametrize("topic", ["org:acme", "session:chat"])
def test_of_a_former_one_nothing_is_left_and_of_others_everything(
    topic: str, client: redis.Redis, roll_up: RollUp
) -> None:
    writer, member = Writer(client), Ingest(client, "a")
    member.join()
    hour = bucket_of(time.time(), 3600) - 7200
    writer.tell(NUMBERS, hour)
    member.step()
    while roll_up.advance(time.time()):
        pass
    told = [transfer(at=time.time(), org="acme", session="chat")]
    client.xadd(STREAM, {FIELD: writer.record(), transfers.FIELD: transfers.encode(told)})
    writer.tell(NUMBERS)
    member.step()
    before = {table: sums(table) for table in (FRESH, *LEVELS)}
    assert all(topic in found for found in before.values())
    free_topic(topic)
    for table, found in before.items():
        del found[topic]
        assert sums(table) == found, table
    kind, _, name = topic.partition(":")
    assert not SlowTransfer.objects.filter(**{kind: name}).exists()
    assert SlowTransfer.objects.count() == (0 if kind == "org" else 1)
    writer.tell(NUMBERS)
    member.step()
    assert sum(sums(FRESH)[topic].values()) == 3


@pytest.mark.parametrize("seen", ["before", "made", "never"])
def test_what_was_still_in_redis_of_a_former_one_does_not_count_for_the_new_one(
    client: redis.Redis, seen: str, roll_up: RollUp
) -> None:
    writer, member = Writer(client), Ingest(client, "a")
    member.join()
    is_read = seen == "before"
    if is_read:
        writer.tell(NUMBERS, time.time() - 60)
        member.step()
    elif seen == "made":
        free_topic("org:acme")
    writer.tell(NUMBERS, time.time() - (BEHIND_SECONDS_MAX if seen == "never" else 0))
    free_topic("org:acme")
    writer.tell(NUMBERS)
    member.step()
    found = sums(FRESH)
    assert sum(found["org:acme"].values()) == 3
    both = 9 if is_read else 6
    assert sum(found["org:globex"].values()) == sum(found["session:chat"].values()) == both


@pytest.mark.parametrize("phase", [0.0, 0.999])
def test_the_first_seconds_of_what_is_new_count(
    client: redis.Redis, phase: float, roll_up: RollUp
) -> None:
    """A record is of a whole second, which had begun before the new one was there."""
    member = Ingest(client, "a")
    member.join()
    free_topic("org:acme")
    Writer(client).tell(NUMBERS, float(int(time.time() - phase)))
    member.step()
    assert sum(sums(FRESH)["org:acme"].values()) == 3


def test_who_had_a_name_is_forgotten_when_no_record_of_then_is_taken(roll_up: RollUp) -> None:
    free_topic("org:acme")
    long_ago = timezone.now() - timedelta(seconds=LATE_SECONDS_MAX + 1)
    FormerTopic.objects.update(ended_at=long_ago)
    free_topic("org:globex")
    assert [one.name for one in FormerTopic.objects.all()] == ["org:globex"]


def test_a_name_that_nobody_had_is_free(roll_up: RollUp) -> None:
    free_topic("org:nobody")


@pytest.mark.django_db(transaction=True)
def test_a_roll_up_ends_its_step_first(roll_up: RollUp) -> None:
    """Else what it has taken from one level and not yet shown in another would stay."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO telemetry_topic (name, seen_on) VALUES ('org:acme', now())")
    with psycopg.connect(**connection.get_connection_params()) as other:
        other.execute("SELECT FROM telemetry_watermark FOR UPDATE")
        with pytest.raises(OperationalError, match="lock timeout"):
            free_topic_at_once("org:acme")
    free_topic_at_once("org:acme")


@transaction.atomic
def free_topic_at_once(topic: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '50ms'")
    free_topic(topic)
