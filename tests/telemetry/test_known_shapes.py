"""What ingest remembers of shapes is bounded, and costs whoever told them and nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import redis
from django.conf import settings

from telemetry.ingest import known_shapes
from telemetry.ingest.known_shapes import KnownShapes
from telemetry.ingest.quotas import SHAPES_MAX, Quotas
from telemetry.ingest.service import Ingest
from telemetry.models import DeadLetterCount, Source
from telemetry.records import FIELD, OWN_STREAM, SHAPE_FIELD
from telemetry.shapes import SERIES_MAX, Shape
from tests.telemetry.writers import Writer, counters

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


@pytest.fixture
def member(client: redis.Redis) -> Ingest:
    made = Ingest(client, "a")
    made.join()
    return made


@pytest.fixture
def shapes(client: redis.Redis) -> KnownShapes:
    return KnownShapes(client, Quotas())


def shape_of(number: int, series: int = 1) -> Shape:
    first = number * SERIES_MAX
    return Shape(counters("test_total", "tier", range(first, first + series)))


def teach(shapes: KnownShapes, source: str, shape: Shape) -> None:
    shapes.learn(source, shape.digest, shape.encoded)


def tell_own(client: redis.Redis, writer: Writer, shape: Shape) -> None:
    """As a process does that has a Redis user of its own: the shape comes with the record."""
    record = writer.record(shape=shape.digest, cells=[[1] * len(shape.series), [], []])
    fields = {FIELD: record, SHAPE_FIELD: shape.encoded}
    client.xadd(f"{OWN_STREAM}driver:{writer.name}", fields)  # type: ignore[arg-type]


def read(member: Ingest) -> None:
    member.streams.look()
    while member.step():
        pass


def test_shapes_that_come_with_their_records_are_bounded(
    shapes: KnownShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_shapes, "SHAPES_MAX", 8)
    monkeypatch.setattr(known_shapes, "SERIES_MAX", 20)
    for number in range(40):
        shapes.release()
        teach(shapes, f"driver:{number}", shape_of(number, 1 + number % 6))
        assert len(shapes) <= 8
        assert shapes.series <= 20
        assert shapes.use(shape_of(number, 1 + number % 6).digest)


def test_what_was_used_longest_ago_goes_and_what_is_in_use_stays(
    shapes: KnownShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_shapes, "SHAPES_MAX", 3)
    a, b, c, d, e = (shape_of(number) for number in range(5))
    for one in (a, b, c):
        teach(shapes, "driver:a", one)
    shapes.release()
    assert shapes.use(a.digest)
    teach(shapes, "driver:a", d)
    assert [shapes.use(one.digest) is not None for one in (a, b, c, d)] == [True, False, True, True]
    teach(shapes, "driver:a", e)
    assert shapes.is_full
    assert not shapes.use(e.digest)
    shapes.release()
    teach(shapes, "driver:a", e)
    assert shapes.use(e.digest)
    assert not shapes.is_full


@pytest.mark.parametrize(("series", "times"), [(1, SHAPES_MAX), (50, 10)])
def test_a_source_teaches_no_more_than_its_quota_and_others_as_before(
    series: int, times: int, shapes: KnownShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.ingest.quotas.SHAPE_SERIES_MAX", 520)
    for number in range(times + 20):
        teach(shapes, "driver:flood", shape_of(number, series))
    assert len(shapes) == times
    assert not shapes.may_teach("driver:flood", shape_of(times, series).digest)
    assert shapes.may_teach("driver:flood", shape_of(0, series).digest)
    teach(shapes, "driver:honest", shape_of(times, series))
    assert len(shapes) == times + 1


@pytest.mark.parametrize(("shapes_max", "series", "each"), [(1000, 25, 1), (100, 1, 25)])
def test_sources_that_fill_the_table_together_displace_no_shape_of_others(
    shapes_max: int, series: int, each: int, shapes: KnownShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them beyond its own quota: by many series, or by many shapes."""
    monkeypatch.setattr(known_shapes, "SHAPES_MAX", shapes_max)
    monkeypatch.setattr(known_shapes, "SERIES_MAX", 100 if series > 1 else 1000)
    honest = shape_of(0, 20)
    teach(shapes, "driver:honest", honest)
    for source in range(5):
        shapes.release()
        for number in range(each):
            teach(shapes, f"driver:{source}", shape_of(1 + source * each + number, series))
    assert shapes.use(honest.digest)
    late = shape_of(500, 20)
    shapes.release()
    teach(shapes, "driver:late", late)
    assert shapes.use(late.digest)


def test_nonsense_counts_as_a_shape(shapes: KnownShapes) -> None:
    for number in range(SHAPES_MAX):
        shapes.learn("driver:flood", b"%016d" % number, b"\xc1")
    teach(shapes, "driver:flood", shape_of(0))
    assert len(shapes) == 0


def test_a_source_that_tells_too_many_shapes_is_there_all_the_same(
    client: redis.Redis, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.ingest.quotas.SHAPES_MAX", 3)
    flood, honest = Writer(client, name="flood"), Writer(client, name="honest")
    for number in range(5):
        tell_own(client, flood, shape_of(number))
    tell_own(client, honest, shape_of(4))
    entry = {FIELD: flood.record(shape=shape_of(9).digest, cells=[[1], [], []])}
    client.xadd(f"{OWN_STREAM}driver:flood", entry)  # type: ignore[arg-type]
    read(member)
    assert member.counts.records == {"written": 7}
    assert member.counts.dead == {"over_quota_shapes": 3}
    assert DeadLetterCount.objects.get().source == "driver:flood"
    assert Source.objects.get(topic="driver:flood").sequence == 6


def test_known_shapes_of_a_batch_stay_known_while_others_are_learned(
    client: redis.Redis, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else records in the stream that many share are refused, although their shapes were told."""
    monkeypatch.setattr(known_shapes, "SHAPES_MAX", 4)
    writers = [Writer(client, name=f"job{number}") for number in range(12)]
    for count in (10, 12):
        for number in range(count):
            writers[number].tell(dict.fromkeys(shape_of(number).series, 1))
        member.step()
    assert member.counts.records == {"written": 22}


def tell_shared(client: redis.Redis, writer: Writer, shape: Shape) -> None:
    writer.tell(dict.fromkeys(shape.series, 1))


@pytest.mark.parametrize("tell", [tell_own, tell_shared])
def test_a_batch_with_more_series_than_are_kept_is_written_in_parts(
    tell: Callable[[redis.Redis, Writer, Shape], None],
    client: redis.Redis,
    member: Ingest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_shapes, "SERIES_MAX", 100)
    monkeypatch.setattr(known_shapes, "ASKED_AT_ONCE", 3)
    for number in range(12):
        tell(client, Writer(client, name=f"job{number}"), shape_of(number, 40))
    member.streams.look()
    assert member.step() == 12
    assert member.counts.records == {"written": 12}
    assert client.xlen("tidegate:telemetry") == member.streams.waiting == 0


def test_a_digest_that_is_too_long_is_no_digest(client: redis.Redis, member: Ingest) -> None:
    client.xadd("tidegate:telemetry", {FIELD: Writer(client).record(shape=b"x" * 17)})
    member.step()
    assert member.counts.records == {"malformed": 1}


def test_what_went_is_read_from_the_database(
    client: redis.Redis, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that has told its shape, and does not tell it with each record."""
    monkeypatch.setattr(known_shapes, "SHAPES_MAX", 1)
    one, other = Writer(client, name="one"), Writer(client, name="other")
    for writer, number in ((one, 1), (other, 2)):
        tell_own(client, writer, shape_of(number))
        read(member)
    record = one.record(shape=shape_of(1).digest, cells=[[5], [], []], at=time.time())
    client.xadd(f"{OWN_STREAM}driver:one", {FIELD: record})
    read(member)
    assert member.counts.records == {"written": 3}


def test_nonsense_is_decoded_once_however_often_it_is_told(
    client: redis.Redis, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs more to find out than to tell."""
    decoded, decode = list[bytes](), Shape.decode

    def counted(encoded: bytes) -> Shape:
        decoded.append(encoded)
        return decode(encoded)

    monkeypatch.setattr(Shape, "decode", counted)
    evil, shape, other = Writer(client, name="evil"), shape_of(0), shape_of(1)
    for number in range(50):
        record = evil.record(shape=shape.digest, cells=[[1], [], []])
        told = {FIELD: record, SHAPE_FIELD: other.encoded if number else b"nonsense"}
        client.xadd(f"{OWN_STREAM}driver:{evil.name}", told)  # type: ignore[arg-type]
    read(member)
    assert len(decoded) == 1
