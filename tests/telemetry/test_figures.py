"""Figures of the last seconds and of the past: whatever a process tells, those of others are right."""

from __future__ import annotations

import time

import pytest
import redis

from telemetry.figures import figures_now, figures_past
from telemetry.ingest.folder import Row
from telemetry.ingest.service import Ingest
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.telemetry.writers import Writer

pytestmark = pytest.mark.django_db

OUT = Series(Kind.COUNTER, "swdriver_bytes_total", (("direction", "out"),))
EVICT = "swdriver_evict_seconds"
MEMORY = "swdriver_org_bytes"


@pytest.fixture
def ingest(client: redis.Redis) -> Ingest:
    made = Ingest(client, "a")
    made.join()
    return made


def test_a_series_that_has_the_name_of_a_metric_and_another_kind_is_none_of_it(
    client: redis.Redis, ingest: Ingest, roll_up: RollUp
) -> None:
    now = time.time()
    other = {Series(Kind.COUNTER, EVICT): 1, Series(Kind.COUNTER, MEMORY): 1}
    Writer(client, name="other").tell(other, at=now)
    Writer(client, name="job7").tell({OUT: 1000, Series(Kind.HISTOGRAM, EVICT): [0.1, 40, 99]}, at=now)
    ingest.step()
    live = figures_now(["driver:job7", "driver:other", "fleet"], now)
    assert live["fleet"].figures.keys() == live["driver:job7"].figures.keys()
    assert "evict.p99" in live["fleet"].figures
    assert live["driver:other"].figures == {"evict.rate": 0, "refill.rate": 0}
    assert "memory" not in figures_past("driver:other", int(now) // 60 * 60, 60, 1)[0]


def test_what_a_clock_that_is_ahead_says_is_no_part_of_now(
    client: redis.Redis, ingest: Ingest, roll_up: RollUp
) -> None:
    """It moves 100 bytes a second, and says so five minutes ahead."""
    now = time.time() // 10 * 10 + 8
    ahead = Writer(client, name="ahead")
    for second in range(-30, 240):
        ahead.tell({OUT: 100}, at=now + second)
    ingest.step()
    figures = figures_now(["driver:ahead", "fleet"], now)
    for topic in ("driver:ahead", "fleet"):
        assert 90 < figures[topic].figures["bytes.out"] < 120


def test_a_topic_whose_rows_make_no_sense_is_left_out(roll_up: RollUp) -> None:
    """Such as those of an earlier version, which did not check them."""
    now = time.time()
    shape, bucket = Shape([Series(Kind.HISTOGRAM, EVICT), OUT]), int(now) // 10 * 10
    rows = [
        Row("driver:a", bucket, shape, shape.cells({OUT: 1})),
        Row("driver:b", bucket, shape, shape.cells({shape.series[1]: [0.1, 9_999, 1]})),
    ]
    copy_in(FRESH, Names().stored(rows, day_of(bucket)))
    assert figures_now(["driver:a", "driver:b"], now).keys() == {"driver:a"}
