"""Partitions of days, whatever clocks say and whoever reads meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
import redis
from django.db import connection
from django.utils import timezone

from console.shell.tasks import forget_what_is_over
from telemetry import events
from telemetry.ingest.folder import bucket_of
from telemetry.ingest.service import Ingest
from telemetry.management.commands.rollup import RollingUp
from telemetry.metrics import Kind
from telemetry.models import Event
from telemetry.shapes import Series
from telemetry.store.rollup import Counts, RollUp, days_kept
from telemetry.store.storage import LEVELS, day_of, make_days
from tests.telemetry.sums import sums
from tests.telemetry.writers import Writer

COLUMNS = Series(Kind.COUNTER, "test_columns_total")
YEARS_SECONDS = 3 * 366 * 86_400
OLD_SECONDS = 86_400 * (days_kept()["10s"] + 1)


def days(level: str) -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT right(inhrelid::regclass::text, 8) FROM pg_inherits WHERE inhparent = %s::regclass",
            [f"telemetry_{level}"],
        )
        return {day for (day,) in cursor.fetchall()}


def written(seconds: float) -> str:
    return day_of(seconds).strftime("%Y%m%d")


@pytest.mark.django_db
def test_a_clock_that_is_ahead_costs_no_history(client: redis.Redis, roll_up: RollUp) -> None:
    Writer(client).tell({COLUMNS: 3}, bucket_of(time.time()) - 60)
    member = Ingest(client, "a")
    member.join()
    member.step()
    events.note("tests.happened", [], "It happened.")
    before = {level: days(level) for level in LEVELS}
    with pytest.MonkeyPatch.context() as patch:
        clock, calendar = time.time, timezone.now
        patch.setattr(time, "time", lambda: clock() + YEARS_SECONDS)
        patch.setattr(timezone, "now", lambda: calendar() + timedelta(seconds=YEARS_SECONDS))
        rolling = RollingUp(Counts())
        while not rolling.round():
            pass
        forget_what_is_over()
    assert {level: days(level) for level in LEVELS} == before
    assert sums("10s")["fleet"] == {"test_columns_total": 3}
    assert Event.objects.filter(kind="tests.happened").exists()
    with connection.cursor() as cursor:
        cursor.execute("SELECT max(at) FROM telemetry_watermark")
        assert cursor.fetchone()[0] <= time.time()


@pytest.mark.django_db
def test_a_day_that_nobody_has_made_is_made_when_it_is_written_to(
    client: redis.Redis, roll_up: RollUp
) -> None:
    """As after the clock was put right, or on a machine that has slept: days are tended once an hour."""
    Writer(client).tell({COLUMNS: 3})
    member = Ingest(client, "a")
    member.join()
    member.step()
    later = 10 * 86_400
    with connection.cursor() as cursor:
        cursor.execute("UPDATE telemetry_fresh SET bucket = bucket + %s", [later])
    while roll_up.advance(time.time() + later + 60):
        pass
    assert sums("10s")["fleet"] == {"test_columns_total": 3}


@pytest.fixture
def old_day() -> Iterator[str]:
    at = time.time() - OLD_SECONDS
    make_days("10s", [day_of(at)])
    yield written(at)
    RollUp().tend_days(time.time())


@pytest.mark.django_db(transaction=True)
def test_who_reads_for_long_holds_up_no_roll_up(
    client: redis.Redis, old_day: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A backup reads all tables for as long as it takes, and no partition of them can be dropped."""
    Writer(client).tell({COLUMNS: 3}, bucket_of(time.time()) - 60)
    member = Ingest(client, "a")
    member.join()
    member.step()
    rolling = RollingUp(Counts())
    with psycopg.connect(**connection.get_connection_params()) as backup:
        backup.execute("SELECT count(*) FROM telemetry_10s")
        rolling.round()
        assert old_day in days("10s")
        assert sums("10s")["fleet"] == {"test_columns_total": 3}
        rolling.round()
        said = [one for one in caplog.messages if "are dropped later" in one]
        assert len(said) == 1, "it waits for the backup again, and all who read wait behind it"
    RollingUp(Counts()).round()
    assert old_day not in days("10s")


@pytest.mark.django_db(transaction=True)
def test_a_roll_up_does_not_wait_for_who_drops_days(client: redis.Redis, roll_up: RollUp) -> None:
    """Who drops a day has the lock of days and waits for all who have read that table. A roll-up has."""
    Writer(client).tell({COLUMNS: 3}, bucket_of(time.time()) - 120)
    member = Ingest(client, "a")
    member.join()
    member.step()
    with psycopg.connect(**connection.get_connection_params()) as dropping:
        dropping.execute("SELECT pg_advisory_xact_lock(hashtext('telemetry days'))")
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '1s'")
        try:
            while roll_up.advance(time.time()):
                pass
        finally:
            with connection.cursor() as cursor:
                cursor.execute("RESET lock_timeout")
    assert sums("1m")["fleet"] == {"test_columns_total": 3}
