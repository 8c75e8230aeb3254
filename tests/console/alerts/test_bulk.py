"""Several alerts at once: acknowledged, assigned and silenced; and how it has been."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone

from console.alerts.models import Alert, Silence, Transition
from console.alerts.services import acknowledge
from console.audit.models import AuditEntry
from tests.conftest import People
from tests.console.alerts.things import make_alert

pytestmark = pytest.mark.django_db
JSON = "application/json"


def bulk(client: Client, verb: str, *alerts: Alert, **more: object) -> object:
    asked = {"verb": verb, "alerts": [one.pk for one in alerts], **more}
    headers = {"Idempotency-Key": str(uuid4())}
    return client.post("/api/v1/alerts/bulk", asked, content_type=JSON, headers=headers).status_code


def test_all_that_are_chosen_change_or_none_does(
    people: People, api_of: Callable[..., Client], rows_of_audit: Callable[[], int]
) -> None:
    mine = [make_alert(rule, "org:acme", people.acme) for rule in ("evict-slow", "refill-slow")]
    other = make_alert("evict-slow", "org:globex", people.globex)
    api = api_of(people.on_call)
    before = rows_of_audit()
    assert bulk(api, "acknowledge", *mine, other) == 404
    assert bulk(api, "silence", *mine, reason="new memory") == 422, "it has no end"
    assert bulk(api, "assign", *mine, username="sam") == 404, "a stranger could not see them"
    assert (rows_of_audit(), Silence.objects.count()) == (before, 0)
    assert not Alert.objects.exclude(acknowledged_at=None).exists()
    assert bulk(api, "acknowledge", *mine, reason="on it") == 200
    assert bulk(api, "assign", *mine, username="carl") == 200
    assert set(Alert.objects.filter(org=people.acme).values_list("assignee__username")) == {("carl",)}
    until = (timezone.now() + timedelta(hours=1)).isoformat()
    assert bulk(api, "silence", *mine, ends_at=until, reason="new memory") == 200
    assert {tuple(one.matchers) for one in Silence.objects.all()} == {
        ("rule=evict-slow", "org=acme"),
        ("rule=refill-slow", "org=acme"),
    }
    actions = list(AuditEntry.objects.order_by("id").values_list("action", flat=True))[before:]
    assert sorted(actions) == sorted(["alert.acknowledge", "alert.assign", "silence.create"] * 2)
    assert bulk(api, "acknowledge", *mine) == 200
    assert rows_of_audit() == before + 6, "again, it changes nothing"


def test_of_several_those_that_ended_meanwhile_are_not_acknowledged(
    people: People, api_of: Callable[..., Client], browser_of: Callable[..., Client]
) -> None:
    fires, over = (make_alert(rule, "org:acme", people.acme) for rule in ("evict-slow", "refill-slow"))
    Alert.objects.filter(pk=over.pk).update(state="quiet")
    asked = {"verb": "acknowledge", "alert": [fires.pk, over.pk]}
    page = browser_of(people.on_call).post("/alerts/bulk/", asked, follow=True).content.decode()
    assert "1 alert acknowledged." in page
    assert "1 alert not acknowledged: no longer open." in page
    assert Alert.objects.exclude(acknowledged_at=None).get() == fires
    assert bulk(api_of(people.on_call), "acknowledge", fires, over) == 200
    page = (
        browser_of(people.on_call)
        .post(f"/alerts/{over.pk}/acknowledge/", {"reason": ""}, follow=True)
        .content.decode()
    )
    assert f"Alert {over.pk} has cleared: there is nothing to acknowledge." in page
    assert "Cleared before it fired." in page
    assert '<span class="status status--ok">cleared</span>' in page


def test_the_page_goes_back_to_the_list_as_it_was(
    people: People, browser_of: Callable[..., Client]
) -> None:
    alert = make_alert("evict-slow", "org:acme", people.acme)
    browser = browser_of(people.on_call)
    asked = {"verb": "acknowledge", "alert": [alert.pk], "query": "severity=page&page=2"}
    done = browser.post("/alerts/bulk/", asked)
    assert done["Location"] == "/alerts/?severity=page&page=2"
    alert.refresh_from_db()
    assert alert.acknowledged_by == "carl"
    nothing = browser.post("/alerts/bulk/", {"verb": "silence"}, follow=True)
    assert "Select at least one alert." in nothing.content.decode()
    Alert.objects.all().delete()
    assert 'id="bulk"' in browser.get("/alerts/").content.decode(), "for what comes while it is open"
    assert 'name="verb"' in browser.get("/alerts/").content.decode()
    assert 'name="verb"' not in browser_of(people.viewer).get("/alerts/").content.decode()


def test_statistics_tell_how_soon_somebody_had_it_in_hand_and_what_was_noise(
    people: People, api_of: Callable[..., Client]
) -> None:
    now = timezone.now()
    alert = make_alert("evict-slow", "org:acme", people.acme, transition_count=4, episode=3)
    alert.transitions.all().delete()

    def transition(number: int, episode: int, minutes: float, after: str) -> None:
        at = now - timedelta(minutes=minutes)
        before = "resolved" if after == "firing" else "firing"
        Transition.objects.create(
            alert=alert, number=number, episode=episode, at=at, before=before, after=after, sentence="x"
        )

    transition(0, 0, 3000, "firing")  # which is before that day: what becomes of it later is not counted
    transition(8, 0, 300, "no_data")
    transition(9, 0, 290, "firing")
    transition(10, 0, 280, "resolved")
    transition(1, 1, 200, "firing")
    transition(2, 1, 195, "resolved")  # noise
    transition(3, 2, 100, "firing")
    transition(4, 2, 80, "no_data")
    transition(5, 2, 70, "firing")  # of the same episode
    transition(6, 2, 40, "resolved")
    transition(7, 3, 5, "firing")
    other = make_alert("refill-slow", "org:globex", people.globex)
    acknowledge(people.principal("on_call"), alert.pk)
    told = api_of(people.viewer).get("/api/v1/alert-statistics?days=1").json()
    [row] = told["rules"]
    assert (row["rule"], row["episodes"], row["acknowledged"], row["noise"]) == ("evict-slow", 3, 1, 1)
    assert 300 <= row["seconds_to_acknowledge"] < 600
    assert row["seconds_open"] == (5 * 60 + 60 * 60) / 2
    everything = api_of(people.platform_viewer).get("/api/v1/alert-statistics").json()
    assert [one["rule"] for one in everything["rules"]] == ["evict-slow", other.rule]
    assert everything["all"]["episodes"] == 5, "in a week there is one more"
