"""What is asked comes out right, whichever level it is read from and however far it is rolled up."""

from __future__ import annotations

import csv
import secrets
from typing import Any

import pytest
from django.db import connection
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from telemetry import queries
from telemetry.histogram import BOUNDS, Histogram
from telemetry.ingest.folder import Row
from telemetry.metrics import Catalog, Kind
from telemetry.models import Topic
from telemetry.queries import Answer, Fold, Question, Unanswerable, as_csv, ask
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, LEVELS, Names, copy_in, day_of

pytestmark = pytest.mark.django_db

CATALOG = Catalog()
HIT = CATALOG.counter("test_hit_tokens_total", "Hits.", "tier")
REQUESTED = CATALOG.counter("test_requested_tokens_total", "Asked for.")
SLOTS = CATALOG.gauge("test_slots", "Slots.")
REFILL = CATALOG.histogram("test_refill_seconds", "Refills.")

HOUR = 1_795_000_000 // 86_400 * 86_400 + 43_200  # noon of some day
DRAM, TIER2 = (Series(Kind.COUNTER, HIT.name, (("tier", tier),)) for tier in ("dram", "tier2"))
ASKED = Series(Kind.COUNTER, REQUESTED.name)
FREE = Series(Kind.GAUGE, SLOTS.name)
TOOK = Series(Kind.HISTOGRAM, REFILL.name)
SHAPE = Shape([DRAM, TIER2, ASKED, FREE, TOOK])


def put(topic: str, bucket: int, values: dict[Series, Any], shape: Shape = SHAPE) -> None:
    rows = [Row(topic, bucket, shape, shape.cells(values))]
    copy_in(FRESH, Names().stored(rows, day_of(bucket)))


@pytest.fixture
def roll_up() -> RollUp:
    made = RollUp()
    made.tend_days(HOUR)
    return made


def answer(metric: Any, fold: Fold, seconds: int = 60, **more: Any) -> Answer:
    now = more.pop("now", HOUR + 7200)
    asked = {"topic": "org:acme", "start": HOUR, "end": HOUR + seconds, "step": 10, **more}
    return ask(Question(metric=metric, fold=fold, **asked), now)


def test_a_counter_is_told_as_a_rate_and_as_a_sum_and_nothing_is_not_zero(roll_up: RollUp) -> None:
    put("org:acme", HOUR, {DRAM: 30, TIER2: 10})
    put("org:acme", HOUR + 20, {DRAM: 0})
    put("org:globex", HOUR, {DRAM: 500})
    [line] = answer(HIT, Fold.RATE, 40).lines
    assert line.values == [4.0, None, 0.0, None]
    [dram, tier2] = answer(HIT, Fold.SUM, 20, by=("tier",)).lines
    assert (dram.labels, dram.values) == ({"tier": "dram"}, [30, None])
    assert (tier2.labels, tier2.values) == ({"tier": "tier2"}, [10, None])
    [line] = answer(HIT, Fold.SUM, 10, where={"tier": "tier2"}).lines
    assert line.values == [10]


def test_hit_rate_is_of_what_was_asked_for_and_nothing_without_traffic(roll_up: RollUp) -> None:
    put("org:acme", HOUR, {DRAM: 30, TIER2: 10, ASKED: 80})
    put("org:acme", HOUR + 10, {DRAM: 0, ASKED: 0})
    [line] = answer(HIT, Fold.RATIO, 30, over=REQUESTED).lines
    assert line.values == [0.5, None, None]
    by_tier = answer(HIT, Fold.RATIO, 10, over=REQUESTED, by=("tier",)).lines
    assert [line.values for line in by_tier] == [[0.375], [0.125]]
    put("org:acme", HOUR + 20, {ASKED: 5}, Shape([ASKED]))
    [line] = answer(HIT, Fold.RATIO, 30, over=REQUESTED).lines
    assert line.values == [0.5, None, 0.0], "asked for, and nothing hit"


def test_a_gauge_has_a_mean_a_highest_and_a_total_over_places(roll_up: RollUp) -> None:
    for node in ("a", "b"):
        put(f"node:{node}", HOUR, {FREE: (40, 10, 7)})
        put("fleet", HOUR, {FREE: (40, 10, 7)})
    assert answer(SLOTS, Fold.TOTAL, 10, topic="fleet").lines[0].values == [8.0]
    assert answer(SLOTS, Fold.MEAN, 10, topic="fleet").lines[0].values == [4.0]
    assert answer(SLOTS, Fold.MAX, 10, topic="fleet").lines[0].values == [7]
    each = answer(SLOTS, Fold.MEAN, 10, topic="node:*", by=("topic",)).lines
    assert [line.labels for line in each] == [{"topic": "node:a"}, {"topic": "node:b"}]


def test_of_too_many_topics_only_those_count_that_have_told_something_since(
    roll_up: RollUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "TOPICS_MAX", 2)
    put("node:a", HOUR, {FREE: (40, 10, 7)})
    put("node:b", HOUR, {FREE: (40, 10, 7)})
    before = day_of(HOUR - 86_400)
    Topic.objects.bulk_create(Topic(name=f"node:old-{one}", seen_on=before) for one in range(3))
    put("node:old-0", HOUR - 86_400, {FREE: (40, 10, 7)})
    every = {"topic": "node:*", "by": ("topic",)}
    assert len(answer(SLOTS, Fold.MEAN, 10, **every).lines) == 2
    put("node:c", HOUR, {FREE: (40, 10, 7)})
    with pytest.raises(Unanswerable, match="more than 2 topics"):
        answer(SLOTS, Fold.MEAN, 10, **every)
    chosen = answer(SLOTS, Fold.MEAN, 10, topics=("node:a", "node:c", "node:x"), **every).lines
    assert [line.labels for line in chosen] == [{"topic": "node:a"}, {"topic": "node:c"}]


def test_a_topic_with_too_many_series_costs_no_other_the_answer(roll_up: RollUp) -> None:
    many = {Series(Kind.COUNTER, HIT.name, (("tier", f"t{one}"),)): 2 for one in range(9)}
    put("node:flood", HOUR, many, Shape(many))
    put("node:a", HOUR, {DRAM: 30, TIER2: 10})
    end, by = HOUR + 10, ("topic", "tier")
    asked = Question(topic="node:*", metric=HIT, fold=Fold.SUM, start=HOUR, end=end, step=10, by=by)
    with pytest.raises(Unanswerable, match="more than 6 series"):
        ask(asked, HOUR + 7200, 6)
    found = ask(asked, HOUR + 7200, 6, 3).lines
    sums = {(line.labels["topic"], line.labels["tier"]): line.values for line in found}
    assert sums == {
        ("node:a", "dram"): [30],
        ("node:a", "tier2"): [10],
        **{("node:flood", f"t{one}"): [2] for one in range(3)},
        ("node:flood", "other"): [12],
    }


def test_what_is_still_going_on_is_not_told_as_less(roll_up: RollUp) -> None:
    put("org:acme", HOUR, {DRAM: 30, FREE: (40, 5, 8)})
    assert answer(HIT, Fold.RATE, 10, now=HOUR + 5).lines[0].values == [6.0]
    assert answer(SLOTS, Fold.TOTAL, 10, now=HOUR + 5).lines[0].values == [8.0]


def test_percentiles_and_heat_maps_are_of_all_histograms_together(roll_up: RollUp) -> None:
    one, other = [0.1, 40, 99], [2.0, 60, 1]
    put("org:acme", HOUR, {TOOK: one})
    put("org:acme", HOUR + 10, {TOOK: other})
    put("org:acme", HOUR + 20, {TOOK: []})
    [p50] = answer(REFILL, Fold.P50, 20, step=20).lines
    [p999] = answer(REFILL, Fold.P999, 20, step=20).lines
    counts = [99 if place == 40 else 1 if place == 60 else 0 for place in range(len(BOUNDS) + 1)]
    assert p50.values == [Histogram(counts).quantile(0.5)]
    assert p999.values == [Histogram(counts).quantile(0.999)]
    assert answer(REFILL, Fold.HEATMAP, 20, step=20).lines[0].values == [counts]
    assert answer(REFILL, Fold.MEAN, 30).lines[0].values == [0.1 / 99, 2.0, None]
    assert answer(REFILL, Fold.SUM, 30).lines[0].values == [99, 1, 0]


AMOUNTS = st.lists(
    st.tuples(st.integers(0, 7100), st.integers(1, 9), st.integers(0, 7300)), min_size=1, max_size=25
)


@pytest.mark.slow
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(AMOUNTS, st.sampled_from([60, 120, 3600]))
def test_sums_are_the_same_however_far_roll_ups_are_and_whatever_is_late(
    roll_up: RollUp, amounts: list[tuple[int, int, int]], step: int
) -> None:
    """Something happened, so much of it, and was rolled up until some moment before the next came in."""
    topic = f"org:{secrets.token_hex(8)}"
    with connection.cursor() as cursor:
        cursor.execute("UPDATE telemetry_watermark SET at = 0")
    expected = [0] * (7200 // step)
    for offset, count, until in amounts:
        put(topic, HOUR + offset // 10 * 10, {DRAM: count})
        expected[offset // step] += count
        while roll_up.advance(HOUR + until):
            pass
        for level in LEVELS:
            if step % LEVELS[level] == 0:
                [line] = answer(HIT, Fold.SUM, 7200, topic=topic, step=step, level=level).lines
                assert [value or 0 for value in line.values] == expected, level


@pytest.mark.parametrize(
    ("hours", "ago_days", "step", "level"),
    [
        (1, 0, 10, "10s"),
        (2, 0, 20, "10s"),
        (6, 0, 60, "1m"),
        (24, 0, 180, "1m"),
        (24 * 30, 29, 7200, "1h"),
        (1, 5, 60, "1m"),
        (1, 100, 3600, "1h"),
    ],
)
def test_the_level_follows_from_the_range_and_from_what_is_kept(
    hours: int, ago_days: int, step: int, level: str
) -> None:
    start = HOUR - ago_days * 86_400
    made = answer(HIT, Fold.SUM, start=start, end=start + hours * 3600, step=None, now=HOUR + 3600)
    assert (made.step, made.level) == (step, level)


@pytest.mark.parametrize(
    ("more", "about", "sentence"),
    [
        ({"fold": Fold.P99}, "fold", "is a counter: it has rate, sum, ratio, not p99"),
        ({"fold": Fold.RATIO}, "over", "over another metric"),
        ({"fold": Fold.RATIO, "over": SLOTS}, "over", "not a counter"),
        ({"by": ("shard",)}, "by", "has tier, not shard"),
        ({"where": {"shard": "a"}}, "by", "has tier, not shard"),
        ({"end": HOUR}, "end", "after the start"),
        ({"step": 15}, "step", "multiple of 10 seconds"),
        ({"end": HOUR + 10 * 86_400, "step": 10}, "step", "points"),
    ],
)
def test_what_can_not_be_answered_is_told_why(more: dict[str, Any], about: str, sentence: str) -> None:
    fold = more.pop("fold", Fold.SUM)
    with pytest.raises(Unanswerable, match=sentence) as refused:
        answer(HIT, fold, **more)
    assert refused.value.about == about


def test_a_table_has_a_row_for_each_step_and_series(roll_up: RollUp) -> None:
    put("org:acme", HOUR, {DRAM: 30, TOOK: [0.1, 40, 99]})
    rows = list(csv.reader(as_csv(answer(HIT, Fold.SUM, 20, by=("tier",))).splitlines()))
    assert rows[0] == ["time", "tier", "sum"]
    assert rows[1][1:] == ["dram", "30"]
    assert rows[2][1:] == ["dram", ""]
    rows = list(csv.reader(as_csv(answer(REFILL, Fold.HEATMAP, 20)).splitlines()))
    assert rows == [
        ["time", "seconds_up_to", "count"],
        [rows[1][0], f"{BOUNDS[40]:.6g}", "99"],
    ]
    assert rows[1][0].endswith("+00:00")
