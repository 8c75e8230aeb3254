"""Numbers over REST: who sees whose, what comes back, and how nonsense is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.conf import settings
from django.test import Client

from console.environment import PROJECT
from console.metrics.catalog import METRICS, table
from console.orgs.services import create_org
from telemetry.histogram import BOUNDS
from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People

pytestmark = pytest.mark.django_db

HIT = Series(Kind.COUNTER, "swdriver_hit_tokens_total", (("tier", "dram"),))
ASKED = Series(Kind.COUNTER, "swdriver_requested_tokens_total")
REFILL = Series(Kind.HISTOGRAM, "swdriver_refill_seconds")


@pytest.fixture(autouse=True)
def numbers(db: None) -> int:
    """Of acme and globex, half a minute ago."""
    now = time.time()
    RollUp().tend_days(now)
    shape, bucket = Shape([HIT, ASKED, REFILL]), bucket_of(now) - 30
    rows = [
        Row(f"org:{org}", bucket, shape, shape.cells({HIT: hits, ASKED: 100, REFILL: [0.1, 40, 9]}))
        for org, hits in (("acme", 25), ("globex", 75))
    ]
    copy_in(FRESH, Names().stored(rows, day_of(now)))
    return bucket


def values(answer: Any) -> list[Any]:
    assert answer.status_code == 200, answer.content
    return [value for line in answer.json()["series"] for value in line["values"] if value is not None]


def test_an_org_has_no_numbers_of_a_former_one_with_its_name(
    people: People, api_of: Callable[..., Client]
) -> None:
    api = api_of(people.platform_admin)
    copy_in(FRESH, Names().stored([_row("initech")], day_of(time.time())))
    create_org(people.principal("platform_admin"), slug="initech", name="Initech")
    assert values(api.get(f"{PATH}?topic=org:initech&{RATIO}")) == []
    assert values(api.get(f"{PATH}?topic=org:acme&{RATIO}")) == [0.25]


def _row(org: str) -> Row:
    shape, bucket = Shape([HIT, ASKED, REFILL]), bucket_of(time.time()) - 30
    cells = shape.cells({HIT: 50, ASKED: 100, REFILL: [0.1, 40, 9]})
    return Row(f"org:{org}", bucket, shape, cells)


PATH = "/api/v1/metrics/query"
RATIO = "name=swdriver_hit_tokens_total&fold=ratio&over=swdriver_requested_tokens_total&by=tier"


def test_an_orgs_numbers_are_its_own(people: People, api_of: Callable[..., Client]) -> None:
    assert values(api_of(people.viewer).get(f"{PATH}?topic=org:acme&{RATIO}")) == [0.25]
    assert values(api_of(people.stranger).get(f"{PATH}?topic=org:globex&{RATIO}")) == [0.75]
    for topic in ("org:globex", "org:*", "fleet", "node:ax-1", "driver:*"):
        answer = api_of(people.org_admin).get(f"{PATH}?topic={topic}&{RATIO}")
        assert answer.status_code == 404, topic
    confined = api_of(people.platform_admin, org=people.acme)
    assert confined.get(f"{PATH}?topic=org:globex&{RATIO}").status_code == 404
    assert confined.get(f"{PATH}?topic=fleet&{RATIO}").status_code == 404
    both = api_of(people.platform_viewer).get(f"{PATH}?topic=org:*&by=topic&{RATIO}").json()["series"]
    assert [line["labels"] for line in both] == [
        {"topic": "org:acme", "tier": "dram"},
        {"topic": "org:globex", "tier": "dram"},
    ]


def test_an_answer_says_what_it_is_of(
    people: People, api_of: Callable[..., Client], numbers: int
) -> None:
    client = api_of(people.viewer)
    asked = "?topic=org:acme&name=swdriver_refill_seconds&fold=heatmap&step=60"
    answer = client.get(PATH + asked).json()
    assert (answer["step_seconds"], answer["resolution"]) == (60, "1m")
    assert answer["bounds"] == list(BOUNDS)
    [counts] = [value for value in answer["series"][0]["values"] if value]
    assert counts[40] == sum(counts) == 9
    table = client.get(f"{PATH}.csv{asked}")
    assert table["Content-Type"].startswith("text/csv")
    assert table.content.decode().splitlines()[1].endswith(",9")


@pytest.mark.parametrize(
    ("question", "pointer", "sentence"),
    [
        ("name=swdriver_refil_seconds&fold=p99", "name", "Did you mean swdriver_refill_seconds?"),
        ("name=swdriver_refill_seconds&fold=ratio", "fold", "is a histogram"),
        ("name=swdriver_refill_seconds&fold=best", "fold", "'best'|Input should be"),
        ("name=swdriver_refill_seconds&fold=p99&by=shard", "by", "has org, not shard"),
        ("name=swdriver_refill_seconds&fold=p99&step=15", "step", "multiple of 10 seconds"),
        (
            "name=swdriver_refill_seconds&fold=p99&end=2020-01-01T00:00:00Z&start=2020-01-01T00:00:00Z",
            "end",
            "after",
        ),
        ("name=swdriver_refill_seconds&fold=p99&start=1990-01-02T00:00:00Z", "start", "3 years"),
        ("name=swdriver_refill_seconds&fold=p99&label=org", "label", "pattern"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_a_sentence(
    question: str, pointer: str, sentence: str, people: People, api_of: Callable[..., Client]
) -> None:
    answer = api_of(people.viewer).get(f"{PATH}?topic=org:acme&{question}")
    assert answer.status_code == 422
    told = answer.json()
    assert pointer in told["errors"][0]["pointer"]
    assert re.search(sentence, told["errors"][0]["detail"])


def test_of_what_was_never_heard_of_there_is_nothing(
    people: People, api_of: Callable[..., Client]
) -> None:
    client = api_of(people.platform_viewer)
    assert client.get(f"{PATH}?topic=node:nope&{RATIO}").status_code == 404
    assert values(client.get(f"{PATH}?topic=fleet&{RATIO}")) == []
    assert values(client.get(f"{PATH}?topic=driver:*&{RATIO}")) == []


def test_every_metric_is_listed_and_documented(people: People, api_of: Callable[..., Client]) -> None:
    listed = api_of(people.viewer).get("/api/v1/metrics").json()
    assert {one["name"] for one in listed} == set(METRICS)
    assert table() in (PROJECT / "docs" / "metrics.md").read_text()


def test_the_page_for_prometheus_tells_how_old_numbers_are(
    people: People, api_of: Callable[..., Client]
) -> None:
    redis.Redis.from_url(settings.REDIS_URL).flushdb()  # what other tests have told
    RollUp().advance(time.time())
    text = api_of(people.platform_viewer).get("/metrics").content.decode()
    assert "tidegate_stream_records 0" in text
    assert re.search(r'tidegate_line_age_seconds\{level="10s"\} \d', text)
    assert re.search(r'tidegate_stored_bytes\{level="10s"\} \d{4}', text)
