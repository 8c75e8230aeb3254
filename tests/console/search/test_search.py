"""Things are found by what one has of them, and nobody finds what they may not see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.accounts.models import User
from console.accounts.principal import SYSTEM
from console.operations.models import Operation
from console.operations.services import start
from console.orgs.models import Org
from console.search.services import kinds, search
from console.sessions.changes.sizes import new_session
from tests.conftest import People
from tests.console.alerts.things import make_alert
from tests.console.fleet.worlds import make_world
from tests.console.operations import machines  # noqa: F401 - registers them

pytestmark = pytest.mark.django_db


def found(people: People, who: str, text: str) -> dict[str, list[str]]:
    groups = search(people.principal(who), text)
    return {group.kind: [one.name for one in group.found] for group in groups}


@pytest.fixture
def world(people: People) -> Operation:
    make_world()
    for org in (people.acme, people.globex):
        new_session(f"{org.slug}-chat", org, 1).save()
        make_alert("refill-slow", f"org:{org.slug}", org)
    make_alert("agent-not-reporting", "node:ax-1")
    with transaction.atomic():
        return start(SYSTEM, "tests.waits", "session:acme-chat", "Wait", plan={}, org_id=people.acme.pk)


def test_everything_of_a_name_is_found_and_only_what_is_theirs(people: People, world: Operation) -> None:
    assert found(people, "platform_viewer", "acme") == {
        "alerts": ["Refill latency above objective: acme"],
        "operations": ["Wait"],
        "orgs": ["Acme"],
        "sessions": ["acme-chat"],
    }
    assert found(people, "viewer", "acme") == found(people, "platform_viewer", "acme")
    assert found(people, "stranger", "acme") == {}
    assert found(people, "stranger", "chat") == {"sessions": ["globex-chat"]}
    assert found(people, "viewer", "ax-1") == {}
    assert found(people, "platform_viewer", "AX-1") == {
        "alerts": ["Agent not reporting: ax-1"],
        "nodes": ["ax-1"],
    }
    assert found(people, "viewer", str(world.pk)) == {"operations": ["Wait"]}
    assert found(people, "stranger", str(world.pk)) == {}


def test_who_is_called_just_so_comes_first_and_not_more_than_asked_for(people: People) -> None:
    for slug in ("chat", "a-chat", "chatter", *(f"zz-chat-{number}" for number in range(8))):
        Org.objects.create(slug=slug, name=slug)
    [group] = search(people.principal("platform_admin"), "chat", 4)
    assert [one.name for one in group.found] == ["chat", "chatter", "a-chat", "zz-chat-0"]
    assert group.are_more
    make_world()
    make_alert("agent-not-reporting", "node:ax-1")
    assert list(found(people, "platform_admin", "AX-1")) == ["nodes", "alerts"], "it is what was meant"


def test_a_request_is_found_by_its_id_by_who_may_see_what_it_changed(
    people: People, api_of: Callable[..., Client]
) -> None:
    changed = api_of(people.org_admin).patch(
        "/api/v1/orgs/acme",
        {"name": "Acme Ltd"},
        content_type="application/json",
        headers={"If-Match": "*", "X-Request-ID": "req-0815-4711"},
    )
    assert changed.status_code == 200
    assert found(people, "on_call", "req-0815-4711") == {"requests": ["Org: update Acme Ltd"]}
    assert found(people, "viewer", "req-0815-4711") == {}


def test_alerts_are_found_by_their_number(people: People, world: Operation) -> None:
    alert = make_alert("evict-slow", "org:acme", people.acme, pk=4_711_000)
    told = found(people, "viewer", "4711000")
    assert told["alerts"] == [f"Evict latency above objective: {alert.subject}"]


def test_page_fragment_and_api_find_the_same(
    people: People, world: Operation, browser_of: Callable[[User], Client], api_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.viewer)
    page = browser.get("/search/?q=acme").content.decode()
    typed = browser.get("/search/?q=acme", headers={"HX-Request": "true"}).content.decode()
    for address in ("/orgs/acme/", "/sessions/acme-chat/", f"/operations/{world.pk}/"):
        assert f'href="{address}"' in page
        assert f'href="{address}"' in typed
    assert "<html" not in typed
    told = api_of(people.viewer).get("/api/v1/search?q=acme").json()
    assert [group["kind"] for group in told] == ["orgs", "alerts", "operations", "sessions"]
    assert told[0]["found"] == [{"name": "Acme", "detail": "acme", "address": "/orgs/acme/"}]
    assert "No results for “nobody”" in browser.get("/search/?q=nobody").content.decode()
    assert set(kinds()) == {
        *("alerts", "boxes", "brains", "drivers", "models", "nodes", "operations", "orgs", "prompts"),
        *("requests", "sessions", "workloads"),
    }


def test_it_takes_as_many_queries_however_much_is_found(people: People) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            search(people.principal("platform_admin"), "a")
        return len(captured)

    make_world()
    make_alert("agent-not-reporting", "node:ax-1")
    few = queries()
    for number in range(5):
        Org.objects.create(slug=f"a-{number}", name="A")
        make_alert("agent-not-reporting", f"node:a-{number}")
        new_session(f"a-{number}", people.acme, 1).save()
    assert queries() <= few + 1


def test_the_search_is_shown_as_a_command_that_runs_nothing_of_it(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    page = browser_of(people.viewer).get("/search/", {"q": "$(touch x)"}).content.decode()
    assert "&#x27;http://testserver/api/v1/search?q=%24%28touch%20x%29&#x27;" in page
