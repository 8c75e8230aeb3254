"""What an emitter tells, what it keeps while nobody listens, and that its host does not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.conf import settings
from hypothesis import given
from hypothesis import strategies as st

from telemetry.cells import Cells, add_sparse, histogram_of, sparse, spread
from telemetry.emit import deltas as deltas_module
from telemetry.emit import emitter as module
from telemetry.emit.deltas import Deltas
from telemetry.emit.emitter import Emitter
from telemetry.emit.exposition import Page
from telemetry.histogram import BUCKETS, Histogram
from telemetry.ingest.received import RANGES_MAX, admit, missing, parse, write
from telemetry.metrics import Catalog, Kind, LabelLimits, Sink
from telemetry.records import STREAM, decode
from telemetry.shapes import Series, Shape
from telemetry.store.merge import merge
from tests.live import wait_until

CATALOG = Catalog()
HITS = CATALOG.counter("test_hits_total", "Hits.", "org", corrected=True)
BYTES = CATALOG.counter("test_bytes_total", "Bytes.", "shard", "direction")
SLOTS = CATALOG.gauge("test_slots", "Slots.", "which")
EVICT = CATALOG.histogram("test_evict_seconds", "Evicts.", "shard")


class Host:
    """Whatever a test puts into it."""

    def __init__(self) -> None:
        self.numbers: dict[Any, Any] = {}

    def collect(self, into: Sink) -> None:
        for metric, samples in self.numbers.items():
            into.put(metric, samples)


def told(shape: Shape, cells: Cells) -> dict[str, Any]:
    return {
        one.name + "".join(f",{value}" for _, value in one.labels): cell
        for one, cell in shape.pairs(cells)
    }


@pytest.mark.parametrize(("shards", "directions"), [(60, 2), (1, 90), (70, 70), (200, 1)])
def test_a_metric_with_too_many_series_takes_nothing_from_others(
    monkeypatch: pytest.MonkeyPatch, shards: int, directions: int
) -> None:
    monkeypatch.setattr(deltas_module, "SERIES_MAX", 50)
    host, evict = Host(), Histogram()
    evict.record(0.001)
    host.numbers = {
        BYTES: [
            ({"shard": f"s{shard}", "direction": f"d{direction}"}, 3)
            for shard in range(shards)
            for direction in range(directions)
        ],
        HITS: [({"org": f"o{org}"}, 5) for org in range(10)],
        SLOTS: [({"which": "free"}, 4)],
        EVICT: [({"shard": "a"}, evict)],
    }
    deltas = Deltas(host.collect)
    shape, cells = deltas.take(1)
    assert len(shape.series) <= 50
    assert deltas.left_out == shards * directions + 12 - len(shape.series)
    found = told(shape, cells)
    assert found.pop("test_slots,free") == (4, 1, 4)
    assert found.pop("test_evict_seconds,a") == [0.001, 40, 1]
    assert [found.pop(f"test_hits_total,o{org}") for org in range(10)] == [5] * 10
    assert sum(found.values()) == 3 * shards * directions
    if (shards, directions) == (60, 2):  # the other label is as it was, and some shards are
        sums = {name: sum(cell for one, cell in found.items() if name in one) for name in ("d0", "d1")}
        assert sums == {"d0": 180, "d1": 180}
        assert found["test_bytes_total,s0,d1"] == 3


def test_what_has_changed_is_told_and_what_was_begun_anew_counts_from_nothing() -> None:
    host = Host()
    deltas = Deltas(host.collect)
    evict = Histogram()
    evict.record(0.001)
    host.numbers = {
        BYTES: [({"shard": "a", "direction": "in"}, 10)],
        SLOTS: [({"which": "free"}, 4)],
        EVICT: [({"shard": "a"}, evict)],
    }
    assert told(*deltas.take(1)) == {
        "test_bytes_total,a,in": 10,
        "test_slots,free": (4, 1, 4),
        "test_evict_seconds,a": [0.001, 40, 1],
    }
    evict.record(0.002, 2)
    host.numbers[BYTES] = [({"shard": "a", "direction": "in"}, 13)]
    first = told(*deltas.take(2))
    assert first["test_bytes_total,a,in"] == 3
    assert first["test_slots,free"] == (8, 2, 4)
    assert first["test_evict_seconds,a"][1:] == [44, 2]
    host.numbers = {
        BYTES: [({"shard": "a", "direction": "in"}, 5)],
        EVICT: [({"shard": "a"}, Histogram())],
    }
    assert told(*deltas.take(1)) == {"test_bytes_total,a,in": 5, "test_evict_seconds,a": []}


def test_a_counter_that_is_corrected_may_fall_and_its_sum_is_right() -> None:
    host, total = Host(), 0
    deltas = Deltas(host.collect)
    for count in (10, 4, 12):
        host.numbers = {HITS: [({"org": "acme"}, count)]}
        total += told(*deltas.take(1))["test_hits_total,acme"]
    assert total == 12


def test_numbers_that_can_not_be_had_once_are_in_the_next() -> None:
    host = Host()
    deltas = Deltas(host.collect)
    host.numbers = {BYTES: [({"shard": "a", "direction": "in"}, 10)], SLOTS: [({}, 1)]}
    with pytest.raises(KeyError):
        deltas.take(1)
    del host.numbers[SLOTS]
    assert told(*deltas.take(1)) == {"test_bytes_total,a,in": 10}


def test_labels_beyond_the_limit_are_summed_up_under_other_and_stay_there() -> None:
    host = Host()
    deltas = Deltas(host.collect, LabelLimits(2))

    def put(**orgs: int) -> dict[str, Any]:
        host.numbers = {HITS: [({"org": org}, count) for org, count in orgs.items()]}
        return told(*deltas.take(1))

    assert put(a=1, b=1, c=5, d=5) == {
        "test_hits_total,a": 1,
        "test_hits_total,b": 1,
        "test_hits_total,other": 10,
    }
    assert deltas.limits.overflowed == 2
    assert put(b=1, c=6, d=5) == {"test_hits_total,b": 0, "test_hits_total,other": 1}
    assert put(b=1, c=7, e=3) == {
        "test_hits_total,b": 0,
        "test_hits_total,other": 1,
        "test_hits_total,e": 3,
    }, "the place of what is gone is given to what is new"
    page = Page(LabelLimits(1))
    page.put(HITS, [({"org": org}, 2) for org in "xyz"])
    assert 'test_hits_total{org="x"} 2\ntest_hits_total{org="other"} 4' in str(page)


COUNTS = st.lists(st.integers(0, 3), min_size=BUCKETS, max_size=BUCKETS)


@given(COUNTS, COUNTS)
def test_histograms_are_added_as_if_all_had_been_recorded_in_one(
    mine: list[int], its: list[int]
) -> None:
    both = add_sparse([sparse(mine, 1.5), [], sparse(its, 2.0)])
    assert spread([both]) == [a + b for a, b in zip(mine, its, strict=True)]
    assert histogram_of([sparse(mine, 1.5), sparse(its, 2.0)]).counts == spread([both])


def test_rows_of_different_shapes_are_added_series_by_series() -> None:
    a, b = Series(Kind.COUNTER, "a_total"), Series(Kind.COUNTER, "b_total")
    one, both = Shape([a]), Shape([a, b])
    [(shape, cells)] = merge([(one, Cells([1], [], [])), (both, Cells([2, 5], [], []))]).parts
    assert (shape.series, cells.counters) == ((a, b), [3, 5])


@given(st.lists(st.lists(st.integers(1, 30), max_size=6), max_size=12))
def test_each_record_is_admitted_once_whatever_the_order(batches: list[list[int]]) -> None:
    ranges = parse("{}")
    seen: set[int] = set()
    for batch in batches:
        fresh, ranges = admit(ranges, batch)
        assert fresh == set(batch) - seen
        seen |= fresh
        assert parse(write(ranges)) == ranges
        assert missing(ranges) == (max(seen) - len(seen) if seen else 0)


def test_gaps_beyond_the_limit_are_given_up_from_the_oldest() -> None:
    fresh, ranges = admit([], range(1, 4 * RANGES_MAX, 2))
    assert len(fresh) == 2 * RANGES_MAX
    assert len(ranges) == RANGES_MAX
    assert ranges[-1] == (4 * RANGES_MAX - 1, 4 * RANGES_MAX)


# With a real Redis, and without


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


def records(client: redis.Redis) -> list[Any]:
    entries: Any = client.xrange(STREAM)
    return [decode(fields) for _, fields in entries]


def test_without_redis_records_wait_and_the_oldest_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, client: redis.Redis
) -> None:
    monkeypatch.setattr(module, "BACKLOG_MAX", 5)
    host = Host()
    emitter = Emitter("redis://127.0.0.1:1/0", "web", "0.1.0", collect=host.collect)
    for second in range(8):
        assert emitter.emit(1000.0 + second) is False
    assert (emitter.dropped, len(emitter._backlog)) == (3, 5)
    emitter._redis.close()
    emitter._redis = client
    assert emitter.emit(1008.0)
    found = records(client)
    assert [record.sequence for record in found] == [5, 6, 7, 8, 9]
    [shape] = {record.shape for record in found}
    encoded: Any = client.get(f"tidegate:telemetry:shape:{shape.hex()}")
    told_shape = Shape.decode(encoded)
    dropped = Series(Kind.COUNTER, "telemetry_dropped_records_total")
    assert sum(dict(told_shape.pairs(one.cells))[dropped] for one in found) == 3


def test_a_redis_that_comes_back_empty_is_told_the_shapes_again(client: redis.Redis) -> None:
    host = Host()
    emitter = Emitter(settings.REDIS_URL, "web", "0.1.0", collect=host.collect)
    emitter.emit(1.0)
    emitter._redis.close()
    emitter._redis = redis.Redis.from_url("redis://127.0.0.1:1/0")
    assert not emitter.emit(2.0)
    client.flushdb()
    emitter._redis = client
    assert emitter.emit(3.0)
    assert len(client.keys("*:shape:*")) == 1


def test_a_record_covers_the_seconds_since_the_last(client: redis.Redis) -> None:
    host = Host()
    host.numbers = {SLOTS: [({"which": "free"}, 10)]}
    emitter = Emitter(settings.REDIS_URL, "web", "0.1.0", collect=host.collect)
    for second in (5, 6, 9, 9, 500):
        emitter.emit(second + emitter._phase + 0.01)
    covered = [[gauge[1] for gauge in one.cells.gauges][1] for one in records(client)]
    assert covered == [1, 1, 3, 0, module.COVERED_SECONDS_MAX]
    emitter._redis.close()


def test_the_last_fraction_of_a_second_is_told_when_the_process_ends(client: redis.Redis) -> None:
    host = Host()
    emitter = Emitter(settings.REDIS_URL, "web", "0.1.0", collect=host.collect).start()
    host.numbers = {BYTES: [({"shard": "a", "direction": "in"}, 10)]}
    emitter.stop()
    assert any(10 in one.cells.counters for one in records(client))  # a second may have ended before


def test_a_failing_collector_is_survived(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    host.numbers = {SLOTS: [({}, 1)]}
    emitter = Emitter(settings.REDIS_URL, "web", "0.1.0", collect=host.collect).start()
    emitter._phase = time.time() % 1 + 0.05
    wait_until("it is noticed", lambda: "Could not report" in caplog.text)
    host.numbers = {BYTES: [({"shard": "a", "direction": "in"}, 10)]}
    emitter.stop()
    assert any(10 in one.cells.counters for one in records(client))
