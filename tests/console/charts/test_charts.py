"""Charts as the server tells them: the table that is their twin, the CSV, and what the browser draws."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable

import pytest
from django.contrib.staticfiles import finders
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts.models import User
from console.charts.finder import folder, styles_it_would_write
from console.charts.services import plan_of
from console.fleet.models import Driver
from console.metrics.catalog import METRICS
from console.sessions.models import DriverOrg, Job, Session
from telemetry.events import note
from telemetry.figures import OF_DRIVERS, OF_STREAMS, figure_of, figures_now
from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of, make_days
from tests.conftest import People
from tests.console.charts.numbers import drawn, tell
from tests.html import compact
from tests.live import wait_until


@pytest.fixture
def page_of(people: People, browser_of: Callable[[User], Client]) -> Callable[..., str]:
    def page(path: str, who: str = "viewer") -> str:
        answer = browser_of(getattr(people, who)).get(path)
        assert answer.status_code == 200
        return compact(answer)

    return page


@pytest.mark.django_db
def test_a_chart_has_its_numbers_once_as_a_drawing_and_once_as_a_table(
    page_of: Callable[..., str],
) -> None:
    bucket = tell("org:acme", time.time())
    page = page_of("/latency/?topic=org:acme&range=15m")
    refill, _, heat, _, size, hits = drawn(page)
    place = (bucket - refill["start"]) // refill["step"]
    assert [one["name"] for one in refill["series"]] == ["p50", "p99"]
    assert refill["series"][0]["values"][place] == pytest.approx(0.0037, rel=0.1)
    assert heat["series"][0]["values"][place][48:50] == [18, 2]
    assert size["series"][0]["values"][place] == 1000
    shares = {one["name"]: one["values"][place] for one in hits["series"]}
    assert shares == {"memory": 0.6, "tier 2": 0.2}, "tiers as the overview calls them"
    assert (refill["unit"], heat["unit"], size["unit"], hits["unit"]) == (
        "seconds",
        "seconds",
        "bytes/s",
        "share",
    )
    tables = re.findall(r"<table>.*?</table>", page, re.DOTALL)
    assert len(tables) == 4, "what told nothing has no table; it says so"
    assert page.count("No data in this time range.") == 2
    assert "3.76 ms" in tables[0]
    assert "60 %" in tables[3]


@pytest.mark.django_db
def test_the_csv_of_a_chart_is_where_it_says(
    page_of: Callable[..., str], people: People, browser_of: Callable[[User], Client]
) -> None:
    tell("org:acme", time.time())
    page = page_of("/latency/?topic=org:acme")
    addresses = [html.unescape(one) for one in re.findall(r'href="(/api[^"]+\.csv[^"]+)"', page)]
    assert len(addresses) == 5
    for address in addresses:
        answer = browser_of(people.viewer).get(address)
        assert answer.status_code == 200, answer.content
        assert answer.content.count(b"\n") > 2
        assert 'filename="org-acme-swdriver_' in answer["Content-Disposition"]


@pytest.mark.django_db
def test_what_happened_stands_on_every_chart_of_its_topic_and_on_no_other(
    page_of: Callable[..., str],
) -> None:
    tell("org:acme", time.time())
    with transaction.atomic():
        note("policy.update", ["org:acme"], "</script><b>policy")
        note("policy.update", ["org:globex"], "of another org")
    page = page_of("/latency/?topic=org:acme")
    assert all(
        [one["sentence"] for one in chart["markers"]] == ["</script><b>policy"] for chart in drawn(page)
    )
    assert "</script><b>" not in page
    assert "of another org" not in page


@pytest.mark.django_db
def test_the_charts_of_a_page_ask_once_what_happened(page_of: Callable[..., str]) -> None:
    with CaptureQueriesContext(connection) as asked:
        charts = drawn(page_of("/latency/?topic=org:acme"))
    assert len(charts) == 6
    assert sum('FROM "telemetry_event"' in query["sql"] for query in asked) == 2, "and once as a list"


@pytest.mark.django_db
def test_the_range_stands_in_the_address_and_stays_there(page_of: Callable[..., str]) -> None:
    page = page_of("/latency/?topic=org:acme&range=6h")
    assert 'href="?topic=org%3Aacme&amp;range=24h"' in page
    assert re.search(r'aria-current="true" href="[^"]*range=6h"', page)
    assert drawn(page)[0]["span"] == 6 * 3600
    fixed = page_of("/latency/?topic=org:acme&from=2026-11-21T03:00&until=2026-11-21T04:00")
    assert drawn(fixed)[0]["span"] is None
    assert "is not a time" in page_of("/latency/?topic=org:acme&from=nonsense")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("compare", "days", "label"), [("day", 1, "yesterday"), ("week", 7, "last week")]
)
def test_a_chart_is_compared_with_an_earlier_time(
    page_of: Callable[..., str], compare: str, days: int, label: str
) -> None:
    now = time.time()
    bucket = tell("org:acme", now)
    make_days("10s", [day_of(now - days * 86_400)])
    tell("org:acme", now - days * 86_400)
    page = page_of(f"/latency/?topic=org:acme&range=15m&compare={compare}")
    refill, _, heat, *_ = drawn(page)
    assert [one["name"] for one in refill["earlier"]] == [f"p50, {label}", f"p99, {label}"]
    earlier = refill["earlier"][1]["values"]
    place = (bucket - refill["start"]) // refill["step"]
    assert [at for at, value in enumerate(earlier) if value is not None] == [place]
    assert len(earlier) > len(refill["series"][0]["values"]), "it is there when time goes on"
    assert refill["step"] == (10 if days == 1 else 60), "as it is kept for so long"
    assert heat["earlier"] == []
    [table] = re.findall(r"<table>.*?</table>", page, re.DOTALL)[:1]
    assert f'<th scope="col" class="number">p99, {label}</th>' in table
    assert table.count("3.76 ms") == 2
    assert page.count(">p99 compared</a>") == 1
    assert re.search(rf'aria-current="true" href="[^"]*compare={compare}"', page)
    assert f"compare={compare}&amp;range=24h" in page, "it stays when the range is another one"


@pytest.mark.django_db
def test_a_range_is_moved_without_scripts_and_another_topic_keeps_it(
    page_of: Callable[..., str],
) -> None:
    fixed = "from=2026-11-21T03:00&until=2026-11-21T04:00"
    page = page_of(f"/latency/?topic=org:acme&{fixed}&compare=nonsense")
    for said, start, end in (
        ("Earlier", "02:30", "03:30"),
        ("Later", "03:30", "04:30"),
        ("Zoom out", "02:30", "04:30"),
    ):
        address = f"from=2026-11-21T{start}:00Z&amp;until=2026-11-21T{end}:00Z"
        assert re.search(rf'<a class="button" title="[^"]*" href="[^"]*{address}">{said}</a>', page)
    assert 'type="hidden" name="from" value="2026-11-21T03:00"' in page
    assert f'/latency/slowest/?topic=org%3Aacme&amp;{_with_seconds(fixed)}"' in page
    assert 'name="until" value="2026-11-21T04:00:00"' in page, "to be changed, in UTC"
    page = page_of(
        "/latency/?topic=org:acme&from=2026-11-21T04:00%2B01:00&until=2026-11-21T05:30%2B01:00"
    )
    assert 'name="from" value="2026-11-21T03:00:00"' in page
    assert 'name="until" value="2026-11-21T04:30:00"' in page
    assert ">Later</a>" not in page_of("/latency/?topic=org:acme"), "than now there is nothing"
    assert drawn(page)[0]["earlier"] == []


def _with_seconds(query: str) -> str:
    return query.replace(":00&", ":00:00Z&amp;") + ":00Z"


@pytest.mark.django_db
def test_figures_stand_there_without_scripts_and_say_of_when_they_are(
    page_of: Callable[..., str],
) -> None:
    assert "no data" in page_of("/latency/?topic=org:acme")
    pages: list[str] = []

    def has_figures() -> object:
        """They are of the last seconds only, which may be over before the page is there."""
        tell("org:acme", time.time())
        pages.append(page_of("/latency/?topic=org:acme"))
        return re.search(r'data-live-figure="refill\.p50" data-unit="seconds">3\.76 ms<', pages[-1])

    wait_until("the page shows figures", has_figures)
    page = pages[-1]
    assert re.search(r'data-live-figure="evict\.p50" data-unit="seconds">no traffic<', page)
    assert re.search(r"as of <time [^>]*data-stale=\"15\">\d{4}-\d\d-\d\d \S+ UTC</time>", page)


@pytest.mark.django_db
def test_a_series_whose_label_is_empty_says_which(page_of: Callable[..., str]) -> None:
    now = time.time()
    labels = (("direction", "in"), ("link", ""), ("nic_leaf", "leaf-1"), ("tier", "rail"))
    path = Series(Kind.HISTOGRAM, "tidegate_driver_path_seconds", labels)
    shape = Shape([path])
    RollUp().tend_days(now)
    row = Row("fleet", bucket_of(now) - 10, shape, shape.cells({path: [0.1, 48, 9, 1]}))
    copy_in(FRESH, Names().stored([row], day_of(now)))
    [of_links] = re.findall(
        r"Refill p99 by link.*?</figure>", page_of("/latency/", "platform_viewer"), re.DOTALL
    )
    assert '<th scope="col" class="number">leaf-1, no spine link</th>' in of_links


@pytest.mark.django_db
def test_an_org_has_the_events_of_the_sessions_that_serve_it_for_who_may_see_them(
    page_of: Callable[..., str], people: People
) -> None:
    for name in ("shared", "away"):
        session = Session.objects.create(
            name=name, org=None, boxes_desired=1, boxes_min=1, boxes_increment=1
        )
        driver = Driver.objects.create(
            name=f"of-{name}",
            control_url="http://127.0.0.1:9",
            control_token="t" * 40,
            joined_at=timezone.now(),
            heartbeat_sha256=name.encode().ljust(32),
        )
        Job.objects.create(session=session, name="job", driver=driver)
        DriverOrg.objects.create(driver=driver, org=people.acme if name == "shared" else people.globex)
        with transaction.atomic():
            note("session.move", [f"session:{name}"], f"A stream of {name} was moved.")
    seen = page_of("/latency/?topic=org:acme&range=15m", "platform_viewer")
    assert "A stream of shared was moved." in seen
    assert [one["sentence"] for one in drawn(seen)[0]["markers"]] == ["A stream of shared was moved."]
    assert "A stream of away was moved." not in seen
    assert drawn(seen)[0]["moreTopics"] == ["session:shared"], "what happens to it is marked at once"
    assert '<span hidden data-live-topic="session:shared">' in seen
    assert 'data-live-topic="org:acme session:shared" hx-trigger="live"' in seen
    assert "was moved." not in page_of("/latency/?topic=org:acme&range=15m")


@pytest.mark.django_db
def test_reasons_are_words_in_a_legend(page_of: Callable[..., str]) -> None:
    tell("org:acme", time.time())
    names = {one["name"] for chart in drawn(page_of("/orgs/acme/")) for one in chart["series"]}
    assert {"never stored", "tier 2"} <= names


@pytest.mark.django_db
def test_the_picker_has_what_somebody_may_see(page_of: Callable[..., str], people: People) -> None:
    tell("node:ax-7", time.time())
    of_member = page_of("/latency/")
    assert "Latency of org acme" in of_member
    assert "ax-7" not in of_member
    of_platform = page_of("/latency/", "platform_viewer")
    assert "Latency of the fleet" in of_platform
    assert '<option value="node:ax-7">node ax-7</option>' in of_platform
    page_of("/latency/?topic=node:ax-7", "platform_viewer")
    people.viewer.memberships.all().delete()
    assert "not a member of any org" in page_of("/latency/")


def test_a_mistake_of_a_page_is_one_at_once() -> None:
    for name, folds, error in (
        ("nothing", "p50", KeyError),
        ("swdriver_refill_seconds", "x", ValueError),
    ):
        with pytest.raises(error):
            plan_of("fleet", "Title", name, folds)
    with pytest.raises(ValueError, match="either lines or one heat map"):
        plan_of("fleet", "Title", "swdriver_refill_seconds", "p50 heatmap")


# Figures


def test_figures_are_made_of_metrics_that_there_are() -> None:
    names = [name for name in (*OF_DRIVERS, *OF_STREAMS) if name]
    assert set(names) <= METRICS.keys()
    assert figure_of("org:a", "swdriver_refill_seconds", "p99", {}) == "refill.p99"
    assert (
        figure_of("node:a", "tidegate_driver_path_seconds", "p50", {}, {"direction": "out"})
        == "evict.p50"
    )
    assert figure_of("node:a", "tidegate_driver_path_seconds", "p50", {}) == ""
    assert figure_of("org:a", "swdriver_refill_seconds", "p99", {}, {"direction": "out"}) == ""
    assert figure_of("org:a", "swdriver_hit_tokens_total", "ratio", {"tier": "dram"}) == "hit.dram"
    assert figure_of("org:a", "swdriver_hit_tokens_total", "ratio", {}) == "hit.rate"
    assert figure_of("org:a", "swdriver_bytes_total", "rate", {"direction": "out"}) == "bytes.out"
    assert figure_of("org:a", "swdriver_refill_seconds", "p999", {}) == ""
    assert figure_of("org:a", "swdriver_refill_seconds", "p99", {"org": "a"}) == ""


@pytest.mark.django_db
def test_figures_of_a_node_are_of_the_streams_that_drivers_measured() -> None:
    """Also over shared memory, of which its agent sees nothing."""
    now = bucket_of(time.time()) + 5.5
    RollUp().tend_days(now)
    out, back = (
        Series(Kind.HISTOGRAM, "tidegate_driver_path_seconds", (("direction", direction),))
        for direction in ("out", "in")
    )
    shape = Shape([out, back])
    cells = shape.cells({out: [0.1, 40, 5], back: [0.2, 60, 15]})
    copy_in(FRESH, Names().stored([Row("node:ax1", bucket_of(now) - 10, shape, cells)], day_of(now)))
    figures = figures_now(["node:ax1"], now)["node:ax1"].figures
    assert figures["refill.rate"] == pytest.approx(3 * figures["evict.rate"])
    assert figures["refill.p50"] > figures["evict.p50"]


@pytest.mark.django_db
def test_figures_are_those_of_the_last_seconds_of_each_topic() -> None:
    now = bucket_of(time.time()) + 5.5
    bucket = tell("org:acme", now)
    tell("org:globex", now - 60)
    found = figures_now(["org:acme", "org:globex", "org:nobody"], now)
    assert set(found) == {"org:acme"}, "what is long ago is not now"
    one = found["org:acme"]
    assert one.seconds == 15
    assert one.figures["refill.rate"] == pytest.approx(20 / 15)
    assert one.figures["refill.p50"] == pytest.approx(0.0037, rel=0.1)
    assert one.figures["bytes.out"] == pytest.approx(10_000 / 15)
    assert (one.figures["hit.rate"], one.figures["hit.dram"]) == (0.8, 0.6)
    assert "evict.p99" not in one.figures, "no traffic is not 0"
    assert one.points[bucket]["refill.rate"] == pytest.approx(2)
    RollUp().advance(now + 60)
    assert figures_now(["org:acme"], now) == {"org:acme": one}, "the same, wherever it is kept"


# Plotly


def test_plotly_comes_from_the_installed_package_and_alone() -> None:
    assert finders.find("plotly/plotly.min.js") == str(folder() / "plotly.min.js")
    assert not finders.find("plotly/widgetbundle.js")
    assert styles_it_would_write(), "if there are none any more, pages need no place for them"
