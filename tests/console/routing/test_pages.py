"""Pages of models, replicas, brains and limits, as people use them."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.accounts.models import User
from console.fleet.models import Brain
from console.routing import traffic
from console.routing.models import EndpointSource, Engine, Replica, ServedModel
from inference_brain.desired import Limits
from inference_brain.upstream.health import State
from telemetry import queries
from telemetry.metrics import Kind
from telemetry.models import Topic
from telemetry.shapes import Series
from telemetry.store.rollup import RollUp
from telemetry.topics import FLEET
from tests.conftest import People
from tests.console.alerts.evaluations import NOW, put
from tests.console.routing.brains import FakeBrain, a_driver, a_model, a_replica, joined
from tests.html import compact

pytestmark = pytest.mark.django_db
MODEL = {"name": "chat", "model": "meta/llama", "tokens_max": "8192", "orgs": "all"}


@pytest.fixture
def admin(people: People, browser_of: Callable[[User], Client]) -> Client:
    RollUp().tend_days(NOW.timestamp())
    return browser_of(people.platform_admin)


def test_empty_pages_say_what_to_do_next(admin: Client) -> None:
    assert "No models yet." in compact(admin.get("/routing/models/"))
    assert "No brains yet." in compact(admin.get("/routing/brains/"))
    page = compact(admin.get("/routing/"))
    assert "No brain has joined yet." in page
    assert "No requests in the last 5 full minutes;" in page
    a_model()
    assert "No replicas yet: requests for acme/chat get 503." in compact(
        admin.get("/routing/models/chat/")
    )


def test_tables_of_the_last_minutes_say_as_of_when_and_are_fetched_anew(admin: Client) -> None:
    page = compact(admin.get("/routing/?org=acme"))
    assert 'hx-get="/routing/?org=acme" hx-trigger="every 30s"' in page
    part = compact(admin.get("/routing/", headers={"HX-Request": "true"}))
    assert part.startswith('<section class="panel wide" aria-labelledby="orgs">')
    ages = re.findall('5 full minutes, as of <time datetime="[^"]+" data-age data-stale="90"', part)
    assert len(ages) == 2


def test_what_brains_do_is_told_of_orgs_that_there_are(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "TOPICS_MAX", 2)  # and there are two orgs
    Topic.objects.bulk_create(Topic(name=f"org:x{one}", seen_on=NOW.date()) for one in range(3))
    assert "No requests in the last 5 full minutes;" in compact(admin.get("/routing/"))
    monkeypatch.setattr(queries, "TOPICS_MAX", 1)
    Topic.objects.bulk_create(Topic(name=f"org:{one}", seen_on=NOW.date()) for one in ("acme", "globex"))
    page = compact(admin.get("/routing/"))
    assert "These tables are not complete: These are more than 1 topics." in page
    assert "No requests" not in page


def states(replica: str, its: State) -> dict[Series, Any]:
    """As a brain reports the state of a replica for ten seconds."""
    labels = (("model", "m"), ("replica", replica))
    return {
        Series(Kind.GAUGE, "brain_replica_state", (*labels, ("state", one))): (
            [10.0, 10, 1.0] if one is its else [0.0, 10, 0.0]
        )
        for one in State
    }


def test_a_replica_is_ready_where_brains_say_so_now(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "time", SimpleNamespace(time=NOW.timestamp))
    labels = (("model", "m"), ("replica", "r2"), ("result", "ok"))
    put(FLEET, {**states("r0", State.READY), **states("r1", State.NO_ENDPOINT)})
    put(FLEET, {Series(Kind.COUNTER, "brain_replica_results_total", labels): 3}, ago=120)
    page = compact(admin.get("/routing/"))
    replicas = page[page.index("By replica") :]
    r1, r0, r2 = (replicas.index(f">{name}</th>") for name in ("r1", "r0", "r2"))
    assert "no endpoint" in replicas[r1:r0]  # those that are not ready are first
    assert "ready" in replicas[r0:r2]
    assert "not reported" in replicas[r2:]
    assert "ready" not in replicas[r1:r0] + replicas[r2:]
    monkeypatch.setattr(traffic, "ROWS_MAX", 2)
    page = compact(admin.get("/routing/"))
    assert "1 more. Those that are not ready come first." in page
    assert ">r2</th>" not in page


def test_the_page_of_a_model_says_how_brains_see_its_replicas_beside_what_is_desired(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "time", SimpleNamespace(time=NOW.timestamp))
    model = a_model(model="m")
    a_replica(model, "r1")
    a_replica(model, "r2", draining=True)
    a_replica(model, "r3", url="", endpoint=EndpointSource.REDIS)
    put(FLEET, {**states("r1", State.UNREACHABLE), **states("r2", State.READY)})
    page = compact(admin.get("/routing/models/chat/"))
    rows = page[page.index("<tbody>") : page.index("</tbody>")].split("</tr>")[:3]
    said = [re.findall(r"<td[^>]*>(.*?)</td>", row)[:3] for row in rows]
    shown = [[" ".join(re.sub("<[^>]*>", " ", cell).split()) for cell in cells] for cells in said]
    url = "http://10.0.0.21:8000"
    assert shown == [
        ["unreachable at 1 brain", "in use", url],
        ["ready", "draining", url],
        ["not reported", "in use", "that of its instance"],
    ]
    monkeypatch.setattr(traffic, "SERIES_MAX", 1)
    assert "States are not known: These are more than 1 series." in compact(
        admin.get("/routing/models/chat/")
    )


def test_a_replica_of_an_emulator_is_shown_as_one(admin: Client) -> None:
    model = a_model()
    a_replica(model, "r1", engine=Engine.OTHER, driver=a_driver(engine="emulator 1"))
    a_replica(model, "r2", engine=Engine.OTHER)
    a_replica(model, "r3")
    page = compact(admin.get("/routing/models/chat/"))
    assert re.findall(r'data-label="Engine">\s*(\w+)', page) == ["emulator", "other", "vLLM"]


def test_a_model_and_a_replica_are_added_edited_drained_and_removed(admin: Client) -> None:
    a_driver()
    assert admin.post("/routing/new-model/", MODEL)["Location"] == "/routing/models/chat/"
    said = {"name": "chat-1", "url": "http://10.0.0.21:8000", "engine": "vllm", "driver": "job7"}
    made = admin.post("/routing/models/chat/new-replica/", {**said, "api_key": "sk-secret"})
    assert made["Location"] == "/routing/models/chat/"
    page = admin.get("/routing/models/chat/replicas/chat-1/").content.decode()
    assert "It has an API key, which stays unless you enter another." in page
    assert "sk-secret" not in page
    edited = {**said, "served_as": "llama", "version": "1"}
    assert admin.post("/routing/models/chat/replicas/chat-1/", edited).status_code == 302
    replica = Replica.objects.get()
    assert (replica.served_as, str(replica.api_key)) == ("llama", "sk-secret")
    assert admin.post("/routing/models/chat/replicas/chat-1/drain/").status_code == 302
    assert "draining" in compact(admin.get("/routing/models/chat/"))
    assert admin.post("/routing/models/chat/replicas/chat-1/drain/").status_code == 302
    assert not Replica.objects.get().draining
    admin.post("/routing/models/chat/replicas/chat-1/remove/", {"typed": "wrong"})
    assert Replica.objects.exists()
    admin.post("/routing/models/chat/replicas/chat-1/remove/", {"typed": "chat-1"})
    admin.post("/routing/models/chat/remove/", {"typed": "chat"})
    assert not ServedModel.objects.exists()


def test_who_has_not_seen_the_last_change_overwrites_nothing(admin: Client, people: People) -> None:
    model = a_model()
    replica = a_replica(model)
    said = {"url": "http://10.0.0.22:8000", "engine": "vllm"}
    limits = {"queued": 1, "wait_seconds": 1, "weight": 1, "priority": 1}
    for path, form, version, now in (
        ("/routing/models/chat/edit/", {**MODEL, "orgs": "acme"}, model.version, "all"),
        ("/routing/models/chat/replicas/chat-1/", said, replica.version, replica.url),
        ("/orgs/acme/limits/", limits, 0, Limits().queued),
    ):
        page = compact(admin.post(path, {**form, "version": "7"}))
        assert "It has changed since" in page
        assert f"<p>Now: {now}.</p>" in page
        assert f'name="version" value="{version}"' in page, "who has looked again may save"
        assert admin.post(path, {**form, "version": version}).status_code == 302


def test_faults_are_shown_at_their_fields(admin: Client) -> None:
    a_model("taken", model="meta/llama")
    page = compact(admin.post("/routing/new-model/", {**MODEL, "tokens_max": "0"}))
    assert "greater than or equal to 1" in page
    assert "already exists" in compact(admin.post("/routing/new-model/", MODEL))
    page = compact(admin.post("/routing/new-model/", {**MODEL, "orgs": "acme, nobody"}))
    assert "There is no such org." in page


def test_a_page_says_what_is_guessed_and_who_has_no_cache(admin: Client, people: People) -> None:
    model = a_model(for_all_orgs=False)
    model.orgs.add(people.acme)
    a_replica(model, "plain", engine="sglang")
    a_replica(model, "new", driver=a_driver("new", model=None), url="http://10.0.0.23:8000")
    page = compact(admin.get("/routing/models/chat/"))
    assert "no driver tells what it holds: brains go by what they sent to it" in page
    assert "its driver has not reported a model yet" in page
    assert "no cache for acme" in page, "the driver serves nobody"


def test_limits_are_read_by_the_org_and_set_by_the_platform(
    people: People, admin: Client, browser_of: Callable[[User], Client], brain: FakeBrain
) -> None:
    a_model()
    page = compact(browser_of(people.viewer).get("/orgs/acme/limits/"))
    assert "a platform admin sets them" in page
    assert "acme/chat" in page
    assert "east" not in page
    refused = browser_of(people.org_admin).post("/orgs/acme/limits/", {"queued": 1})
    assert refused.status_code == 403
    limits = {"queued": 9, "wait_seconds": "2.5", "weight": 50, "priority": 1, "version": "0"}
    assert admin.post("/orgs/acme/limits/", {**limits, "concurrent": 4}).status_code == 302
    page = compact(browser_of(people.viewer).get("/orgs/acme/limits/"))
    assert "version 1" in page
    assert "9, for at most 2.5 s" in page


def test_a_brain_has_a_page_and_is_removed_there(admin: Client, brain: FakeBrain) -> None:
    page = compact(admin.get("/routing/brains/"))
    assert "http://127.0.0.1:8440" in page
    assert "It is still alive" in compact(admin.get("/routing/brains/east/"))
    admin.post("/routing/brains/east/remove/", {"typed": "west"})
    assert Brain.objects.exists()
    assert admin.post("/routing/brains/east/remove/", {"typed": "east"}).status_code == 302
    assert not Brain.objects.exists()


def test_lists_take_as_many_queries_for_many_as_for_few(admin: Client, people: People) -> None:
    def queries(path: str) -> int:
        with CaptureQueriesContext(connection) as asked:
            assert admin.get(path).status_code == 200
        return len(asked)

    def add(number: int) -> None:
        model = a_model(f"m{number}", for_all_orgs=False)
        model.orgs.add(people.acme, people.globex)
        for one in range(3):
            driver = a_driver(f"d{number}-{one}")
            a_replica(model, f"r{one}", driver=driver)

    add(0)
    before = queries("/routing/models/"), queries("/api/v1/models")
    for number in range(1, 5):
        add(number)
    assert (queries("/routing/models/"), queries("/api/v1/models")) == before


def test_a_member_of_no_platform_sees_the_traffic_of_their_org_only(
    people: People, admin: Client, browser_of: Callable[[User], Client]
) -> None:
    viewer = browser_of(people.viewer)
    page = compact(viewer.get("/routing/"))
    assert "Routing of Acme" in page
    assert "By replica" not in page
    assert viewer.get("/routing/?org=globex").status_code == 404
    assert "By replica" in compact(admin.get("/routing/"))


def test_brains_are_listed_in_constant_queries(admin: Client, brain: FakeBrain) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as asked:
            assert admin.get("/routing/brains/").status_code == 200
        return len(asked)

    before = queries()
    for number in range(4):
        brain.name = f"b{number}"
        joined(brain)
    assert queries() == before
