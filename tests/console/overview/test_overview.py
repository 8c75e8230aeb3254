"""The page that somebody opens at night: what is wrong, numbers with their past, what runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts.models import User
from console.accounts.principal import SYSTEM
from console.alerts.models import Evaluation
from console.alerts.rules.catalogue import RULES
from console.operations.services import start
from console.orgs.models import Org
from console.overview import services, trends
from console.shell import presence
from telemetry.ingest.folder import Row
from telemetry.metrics import Kind
from telemetry.models import Source
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People
from tests.console.alerts.things import make_alert
from tests.console.fleet.worlds import make_world
from tests.console.operations import machines  # noqa: F401 - registers them

REFILL = Series(Kind.HISTOGRAM, "swdriver_refill_seconds")
HIT = Series(Kind.COUNTER, "swdriver_hit_tokens_total", (("tier", "dram"),))
ASKED = Series(Kind.COUNTER, "swdriver_requested_tokens_total")
HELD = Series(Kind.GAUGE, "swdriver_org_bytes")
RAIL, SPINE = (
    Series(Kind.COUNTER, "tidegate_driver_path_bytes_total", (("tier", tier),))
    for tier in ("rail", "spine")
)
SHAPE = Shape([REFILL, HIT, ASKED, HELD, RAIL, SPINE])


@pytest.fixture(autouse=True)
def _moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are told and looked at in one moment, and no step or minute ends in between."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


def tell(topic: str, ages: Sequence[float], hits: float = 50) -> None:
    """A hundred tokens asked for, so many seconds ago; and a gibibyte held for ten seconds."""
    now = time.time()
    cells = SHAPE.cells(
        {
            REFILL: [1.0, 48, 10],
            HIT: hits,
            ASKED: 100,
            RAIL: 75,
            SPINE: 25,
            HELD: (10 << 30, 10, 1 << 30),
        }
    )
    rows = []
    for age in ages:
        at = int(now - age) // 10 * 10
        RollUp().tend_days(at)
        rows.append(Row(topic, at, SHAPE, cells))
    copy_in(FRESH, Names().stored(rows, day_of(now)))


def source(kind: str, name: str) -> Source:
    """A process that has just told of itself."""
    now = timezone.now()
    return Source(
        name=f"{kind}:{name}", kind=kind, topic=f"{kind}:{name}", version="0", host="h", process_id=1,
        started_at=now, sequence=1, seen_at=now,
    )  # fmt: skip


def heard() -> None:
    source("driver", "job-7").save()
    Evaluation.objects.bulk_create(
        Evaluation(rule=rule.slug, at=timezone.now(), took_ms=1) for rule in RULES
    )


def test_a_line_is_drawn_from_nothing_to_the_most_and_broken_where_nothing_is_known() -> None:
    assert trends.line([0, 5, None, 10]) == "M2.0 22.0 L35.3 12.0 M102.0 2.0"
    assert trends.line([]) == ""
    assert trends.line([0.0, 0.0]) == "M2.0 22.0 L102.0 22.0"


@pytest.mark.parametrize(
    ("values", "yesterday", "is_share", "said"),
    [
        ([1.0, 1.5], 2.0, False, ["50 % up in an hour", "25 % down in a day"]),
        ([0.1, 0.4], 0.401, False, ["4 times in an hour", "same as yesterday"]),
        ([0.5, 0.25], 0.24, True, ["25 points down in an hour", "same as yesterday"]),
        ([0.0, 3.0], None, False, ["up from zero in an hour"]),
        ([None, 0.0], 0.0, False, ["same as yesterday"]),
        ([None, 1.0], None, False, []),
        ([1.0, None], 1.0, False, []),
        ([], 1.0, False, []),
    ],
)
def test_a_trend_is_said_in_words(
    values: list[float | None], yesterday: float | None, is_share: object, said: list[str]
) -> None:
    told = [words for _, words in trends.changes(values, yesterday, is_share=bool(is_share))]
    assert told == said


@pytest.mark.django_db
def test_each_figure_has_its_past_and_what_is_judged_by_it(people: People) -> None:
    tell("fleet", [0, 10, 100])
    minute = time.time() % 60 + 3660  # since one that is long over had begun
    tell("fleet", [minute - second for second in range(0, 60, 10)], hits=80)
    tell("fleet", [86_400 + 120], hits=20)
    alert = make_alert("refill-slow", "org:acme", people.acme)
    found = services.overview(people.principal("platform_viewer"))
    figures = {one.name: one for one in found.figures}
    hits = figures["hit.rate"]
    assert (hits.past[0], hits.value, hits.past[-1], hits.yesterday) == (0.8, 0.5, 0.5, 0.2)
    assert set(hits.past[1:-1]) == set(figures["refill.rate"].past[1:-1]) == {None}
    assert figures["hit.dram"].label == "Hits in memory"
    assert figures["spine.share"].value == 0.25
    assert figures["memory"].past[0] == 1 << 30, "of the one minute that is known"
    assert (figures["refill.p99"].alert, hits.alert) == (alert, None)


@pytest.mark.django_db
def test_no_traffic_is_said_only_while_drivers_tell_and_their_silence_ages(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    """The console's own processes, which go on, make no number fresh."""
    make_world()
    heard()
    source("web", "h").save()
    tell("fleet", [0, 10, 100])
    browser = browser_of(people.platform_viewer)
    page = browser.get("/").content.decode()
    assert ("no traffic" in page, "no data" in page) == (True, False)
    Source.objects.filter(kind="driver").update(seen_at=timezone.now() - timedelta(minutes=3))
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM telemetry_fresh WHERE bucket > %s", [time.time() - 60])
    page = browser.get("/").content.decode()
    assert ("no traffic" in page, "no data" in page) == (False, True)
    assert re.search(r"last 10 to 20 s, as of\s.{,300}>3 min ago", page, re.DOTALL)


@pytest.mark.django_db
def test_members_see_their_org_and_nothing_of_others(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    make_world()
    heard()
    tell("org:acme", [0, 10], hits=40)
    tell("fleet", [0, 10], hits=90)
    make_alert("refill-slow", "org:globex", people.globex)
    make_alert("agent-not-reporting", "node:ax-1")
    with transaction.atomic():
        start(SYSTEM, "tests.waits", "session:x", "Of globex", plan={}, org_id=people.globex.pk)
        start(SYSTEM, "tests.waits", "session:y", "Of acme", plan={}, org_id=people.acme.pk)
    page = browser_of(people.viewer).get("/").content.decode()
    assert "Acme now" in page
    assert "40 %" in page
    assert "All is well." in page
    assert "Of acme" in page
    for others in ("90 %", "globex", "Globex", "ax-1", "Nodes", "Console processes"):
        assert others not in page, others
    assert browser_of(people.viewer).get("/?org=globex").status_code == 404
    of_one = browser_of(people.platform_viewer).get("/?org=globex").content.decode()
    assert "Refill latency above objective" in of_one
    assert "Agent not reporting" not in of_one


@pytest.mark.django_db
def test_the_verdict_is_of_the_gravest_and_never_well_where_nobody_looks(
    people: People, api_of: Callable[..., Client]
) -> None:
    api = api_of(people.platform_viewer)

    def verdict() -> str:
        return str(api.get("/api/v1/overview").json()["verdict"])

    assert verdict() == "Alert rules are not being evaluated."
    heard()
    assert verdict() == "All is well."
    make_alert("agent-not-reporting", "node:ax-1", state="no_data")
    assert verdict() == "1 alert without data."
    make_alert("spine-share", "session:chat", severity="ticket")
    assert verdict() == "1 alert firing (no pages)."
    make_alert("refill-slow", "org:acme", people.acme)
    assert verdict() == "2 alerts firing (1 page)."


@pytest.mark.django_db
def test_it_is_not_well_by_rules_that_were_last_evaluated_a_while_ago(
    people: People, api_of: Callable[..., Client], browser_of: Callable[[User], Client]
) -> None:
    """As while Redis hangs. They count as late only after a minute."""
    heard()
    ago = {15: "All is well.", 45: "No alert is firing, but rules were last evaluated "}
    for seconds, verdict in ago.items():
        Evaluation.objects.update(at=timezone.now() - timedelta(seconds=seconds))
        read = api_of(people.platform_viewer).get("/api/v1/overview").json()
        page = browser_of(people.platform_viewer).get("/").content.decode()
        assert read["verdict"].startswith(verdict)
        assert verdict in page


@pytest.mark.django_db
def test_who_does_not_see_a_cause_sees_what_it_explains(
    people: People, browser_of: Callable[[User], Client], api_of: Callable[..., Client]
) -> None:
    """Causes are of the fleet. To a member all would be well just because nobody knows anything, and
    that there is a cause is not theirs to see."""
    heard()
    late = make_alert("telemetry-late", "fleet", pk=4_711_000)
    make_alert("refill-slow", "org:acme", people.acme, state="no_data", suppressed_by=late)
    mine, everything = api_of(people.viewer), api_of(people.platform_viewer)
    assert mine.get("/api/v1/overview").json()["verdict"] == "1 alert without data."
    assert everything.get("/api/v1/overview").json()["verdict"] == "1 alert firing (1 page)."
    assert mine.get("/api/v1/hand-over").json()["open_count"] == 1
    [alert] = mine.get("/api/v1/alerts").json()["items"]
    assert alert["suppressed_by"] is None
    assert everything.get("/api/v1/alerts?suppressed=true&rule=refill-slow").json()["items"][0][
        "suppressed_by"
    ]
    for path in ("/", "/alerts/", "/alerts/?hidden=on", f"/alerts/{alert['id']}/", "/hand-over/"):
        page = browser_of(people.viewer).get(path).content.decode()
        assert "Refill latency above objective" in page, path
        assert "4711000" not in page, path
        assert "xplained by" not in page, path


@pytest.mark.django_db
def test_the_api_says_what_the_page_shows(people: People, api_of: Callable[..., Client]) -> None:
    tell("org:acme", [0, 10, 100])
    alert = make_alert("refill-slow", "org:acme", people.acme)
    told = api_of(people.on_call).get("/api/v1/overview?org=acme").json()
    assert (told["topic"], told["fleet"], told["alert_count"]) == ("org:acme", None, 1)
    assert told["alerts"][0]["id"] == alert.pk
    figures = {one["name"]: one for one in told["figures"]}
    assert (figures["hit.rate"]["value"], figures["hit.rate"]["unit"]) == (0.5, "share")
    assert (figures["refill.p99"]["label"], figures["refill.p99"]["alert"]) == ("Refill p99", alert.pk)
    assert len(figures["refill.p99"]["past"]) == services.STEPS
    assert "spine.share" not in figures
    everything = api_of(people.platform_viewer).get("/api/v1/overview").json()
    assert {"name": "spine.share"}.items() <= everything["figures"][-2].items()


@pytest.mark.django_db
def test_a_console_without_nodes_says_what_to_do(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    page = browser_of(people.platform_admin).get("/").content.decode()
    assert re.search(r"Get started.*Describe the fleet.*join token.*Create a session", page, re.DOTALL)
    assert "The fleet now" not in page
    make_world()
    assert "Get started" not in browser_of(people.platform_admin).get("/").content.decode()


@pytest.mark.django_db
def test_no_process_of_the_console_is_missed_beside_however_many_agents(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    agents = [source("agent", f"ax-{number}") for number in range(1000)]
    Source.objects.bulk_create([*agents, *(source(kind, "h") for kind in presence.KINDS)])
    page = browser_of(people.platform_admin).get("/").content.decode()
    shown = page.partition('id="processes"')[2]
    assert "not seen" not in shown
    assert re.findall(r'data-label="Process">(\w+)<', shown) == sorted(presence.KINDS)
    Source.objects.filter(kind__in=("worker", "orchestrator")).delete()
    page = browser_of(people.platform_admin).get("/").content.decode()
    assert re.search(r"\sworker: not seen for 10 s", page), "an orchestrator is not needed everywhere"


@pytest.mark.django_db
def test_a_process_that_was_stopped_is_not_shown_as_silent(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    former = source("web", "former")
    former.ended_at = former.seen_at = timezone.now() - timedelta(minutes=1)
    Source.objects.bulk_create([former, *(source(kind, "h") for kind in presence.KINDS)])
    page = browser_of(people.platform_admin).get("/").content.decode()
    shown = page.partition('id="processes"')[2]
    assert re.findall(r'data-label="Process">(\w+)<', shown) == sorted(presence.KINDS)
    Source.objects.filter(kind="web").update(ended_at=timezone.now())
    page = browser_of(people.platform_admin).get("/").content.decode()
    assert re.search(r"web: not seen for 10 s", page)


@pytest.mark.django_db
def test_no_process_is_missed_beside_however_many_of_its_own_kind_and_others(
    people: People, browser_of: Callable[[User], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "SHOWN_MAX", 3)
    ingest = [source("ingest", f"h-{number}") for number in range(4)]
    Source.objects.bulk_create([*ingest, *(source(kind, "h") for kind in presence.KINDS)])
    page = browser_of(people.platform_admin).get("/").content.decode()
    shown = page.partition('id="processes"')[2]
    assert "not seen" not in shown
    assert len(re.findall(r'data-label="Process">', shown)) == 3
    assert "7 more." in shown


@pytest.mark.django_db
def test_the_org_that_is_looked_at_is_the_one_that_is_chosen_among_however_many(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    names = [f"o-{number:03}" for number in range(services.ORGS_OFFERED + 1)]
    Org.objects.bulk_create(Org(slug=name, name=name) for name in names)
    page = browser_of(people.platform_viewer).get(f"/?org={names[-1]}").content.decode()
    assert re.findall(r'<option value="([^"]*)" selected>', page) == [names[-1]]


@pytest.mark.django_db
def test_who_is_in_no_org_is_told_so(people: People, browser_of: Callable[[User], Client]) -> None:
    people.viewer.memberships.all().delete()
    assert "You are not a member of an org yet" in browser_of(people.viewer).get("/").content.decode()


@pytest.mark.django_db
def test_it_takes_as_many_queries_however_much_there_is(people: People) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            services.overview(people.principal("platform_admin"))
        return len(captured)

    tell("fleet", [0, 10, 100])
    make_alert("refill-slow", "org:acme", people.acme)
    queries()  # shapes are learned once by a process
    few = queries()
    tell("fleet", [0, 10, 100, 3700])
    for number in range(8):
        make_alert("agent-not-reporting", f"node:ax-{number}")
    assert queries() == few
    assert few <= 30
