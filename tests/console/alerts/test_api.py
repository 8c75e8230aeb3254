"""Alerts, silences, thresholds and channels over REST and as pages: whose they are; what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from console.alerts.models import Alert, Channel, Silence, Thresholds
from console.audit.models import AuditEntry
from telemetry.models import Event
from tests.conftest import People
from tests.console.alerts.things import make_alert, make_channel, make_silence

pytestmark = pytest.mark.django_db

Api = Callable[..., Client]
JSON = "application/json"


def subjects(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.content
    return [one["subject"] for one in answer.json()["items"]]


def audited(action: str) -> list[tuple[str, int | None]]:
    found = AuditEntry.objects.filter(action=action).order_by("pk")
    return list(found.values_list("actor_name", "org_id"))


def test_members_see_the_alerts_of_their_own_orgs(people: People, api_of: Api) -> None:
    make_alert("refill-slow", "org:acme", people.acme)
    make_alert("refill-slow", "org:globex", people.globex)
    make_alert("queue-deep", "node:ax-7")
    make_alert("evict-slow", "org:acme", people.acme, state="quiet", fired_at=None)
    assert subjects(api_of(people.viewer).get("/api/v1/alerts")) == ["acme"]
    assert subjects(api_of(people.stranger).get("/api/v1/alerts")) == ["globex"]
    assert subjects(api_of(people.platform_viewer).get("/api/v1/alerts")) == ["ax-7", "globex", "acme"]
    confined = api_of(people.platform_admin, org=people.globex)
    assert subjects(confined.get("/api/v1/alerts")) == ["globex"]
    assert api_of(people.viewer).get("/api/v1/alerts?org=globex").status_code == 404


@pytest.mark.usefixtures("contexts_of_pages")
def test_page_and_api_have_the_same_filters(
    people: People, api_of: Api, browser_of: Callable[..., Client]
) -> None:
    cause = make_alert("agent-not-reporting", "node:ax-7")
    make_alert("queue-deep", "node:ax-7", labels={"shard": "a"}, suppressed_by=cause)
    make_alert("hit-rate-drop", "org:acme", people.acme, severity="ticket", state="resolved")
    make_alert("tier2-near-cap", "node:ax-3", state="pending", fired_at=None)
    api, browser = api_of(people.platform_viewer), browser_of(people.platform_viewer)
    for query, expected in {
        "": ["ax-3", "ax-7"],
        "?state=all&suppressed=true": ["ax-3", "acme", "ax-7, shard a", "ax-7"],
        "?state=resolved": ["acme"],
        "?state=pending": ["ax-3"],
        "?severity=ticket&state=all": ["acme"],
        "?rule=agent-not-reporting": ["ax-7"],
        "?topic=node:ax-3": ["ax-3"],
        "?q=AX-3": ["ax-3"],
        "?org=acme&state=all": ["acme"],
    }.items():
        assert subjects(api.get(f"/api/v1/alerts{query}")) == expected, query
        page = browser.get(f"/alerts/{query.replace('suppressed=true', 'suppressed=on')}")
        shown = [alert.subject for alert, *_ in page.context["rows"]]
        assert sorted(shown) == sorted(expected), query
    firing_first = [alert.state for alert, *_ in browser.get("/alerts/?state=all").context["rows"]]
    assert firing_first == ["firing", "pending", "resolved"]


def test_the_number_of_queries_does_not_grow_with_the_alerts(
    people: People, api_of: Api, browser_of: Callable[..., Client], django_assert_max_num_queries: Any
) -> None:
    cause = make_alert("agent-not-reporting", "node:ax-0")
    for number in range(30):
        more = {"assignee": people.on_call, "suppressed_by": cause}
        make_alert("refill-slow", f"org:acme-{number}", people.acme, **more)
    make_silence(["rule=refill-slow"])
    browser, api = browser_of(people.platform_admin), api_of(people.platform_admin)
    with django_assert_max_num_queries(14):
        browser.get("/alerts/?suppressed=on")
    with django_assert_max_num_queries(8):
        api.get("/api/v1/alerts?suppressed=true")


def test_what_is_done_to_an_alert_is_recorded_once_and_does_not_touch_its_state(
    people: People, api_of: Api
) -> None:
    alert = make_alert("refill-slow", "org:acme", people.acme)
    api = api_of(people.on_call)
    path = f"/api/v1/alerts/{alert.pk}"
    for _ in range(2):
        told = api.post(f"{path}/acknowledge", {"reason": "on it"}, content_type=JSON).json()
    assert (told["state"], told["acknowledged_by"]) == ("firing", "carl by token test")
    assert audited("alert.acknowledge") == [("carl by token test", people.acme.pk)]
    assert AuditEntry.objects.get(action="alert.acknowledge").reason == "on it"
    api.put(f"{path}/assignee", {"username": "olga"}, content_type=JSON)
    nobody = api.put(f"{path}/assignee", {"username": "sam"}, content_type=JSON)
    assert nobody.status_code == 404, "who may not see it can't have it"
    said = api.post(f"{path}/comments", {"text": "disk"}, content_type=JSON)
    assert (said.status_code, said.json()["author"]) == (201, "carl by token test")
    whole = api.get(path).json()
    assert (whole["assignee"], [one["text"] for one in whole["comments"]]) == ("olga", ["disk"])
    assert [transition["after"] for transition in whole["transitions"]] == ["firing"]
    kinds = set(Event.objects.filter(topics__contains=["org:acme"]).values_list("kind", flat=True))
    assert kinds == {"alert.acknowledge", "alert.assign", "alert.comment"}
    api.post(f"{path}/unacknowledge", {}, content_type=JSON)
    assert api.get(path).json()["acknowledged_at"] is None
    for state, ended in (("quiet", "cleared"), ("resolved", "resolved")):
        Alert.objects.update(state=state)
        over = api.post(f"{path}/acknowledge", {}, content_type=JSON)
        assert (over.status_code, over.json()["reason"]) == (409, "Conflict")
        assert over.json()["detail"] == f"Alert {alert.pk} has {ended}: there is nothing to acknowledge."
    assert Alert.objects.get().acknowledged_at is None


def silence(api: Client, key: str, **more: Any) -> Any:
    body = {
        "matchers": ["node=ax-7"],
        "ends_at": (timezone.now() + timedelta(hours=1)).isoformat(),
        "reason": "new memory",
        **more,
    }
    return api.post("/api/v1/silences", body, content_type=JSON, headers={"Idempotency-Key": key})


def test_a_silence_has_matchers_an_end_an_author_and_a_reason(people: People, api_of: Api) -> None:
    api = api_of(people.platform_on_call)
    made = silence(api, "a")
    assert made.status_code == 201
    assert (made.json()["author"], made.json()["state"]) == ("otto by token test", "active")
    assert silence(api, "a", reason="another body").status_code == 422
    over = (timezone.now() - timedelta(seconds=1)).isoformat()
    far = (timezone.now() + timedelta(days=91)).isoformat()
    faults: tuple[dict[str, Any], ...] = (
        {"matchers": []},
        {"matchers": ["nonsense"]},
        {"ends_at": over},
        {"ends_at": far},
        {"reason": ""},
        {"reason": "   "},
    )
    for fault in faults:
        answer = silence(api, "b", **fault)
        assert answer.status_code == 422, fault
        assert f"/body/{next(iter(fault))}" in answer.json()["errors"][0]["pointer"]
    alert = make_alert("queue-deep", "node:ax-7")
    assert api.get(f"/api/v1/alerts/{alert.pk}").json()["silenced_by"] == made.json()["id"]
    path = f"/api/v1/silences/{made.json()['id']}"
    assert api.delete(path).status_code == 428
    assert api.delete(path, headers={"If-Match": '"7"'}).status_code == 412
    ended = api.delete(path, headers={"If-Match": made["ETag"]})
    assert (ended.status_code, ended.json()["state"]) == (200, "expired")
    assert api.get(f"/api/v1/alerts/{alert.pk}").json()["silenced_by"] is None
    assert Silence.objects.count() == 1, "it stays on record"
    assert audited("silence.create") == audited("silence.end")


def test_who_is_on_call_in_an_org_silences_that_org_and_no_other(people: People, api_of: Api) -> None:
    api = api_of(people.on_call)
    assert silence(api, "a", org="acme").status_code == 201
    assert silence(api, "b").status_code == 403
    assert silence(api, "c", org="globex").status_code == 404
    assert silence(api_of(people.viewer), "d", org="acme").status_code == 403
    assert [one["org"] for one in api_of(people.viewer).get("/api/v1/silences").json()["items"]] == [
        "acme"
    ]
    assert api_of(people.stranger).get("/api/v1/silences").json()["items"] == []


def thresholds(api: Client, rule: str, if_match: str, org: str = "", **body: Any) -> Any:
    query = f"?org={org}" if org else ""
    path = f"/api/v1/alert-rules/{rule}/thresholds{query}"
    return api.put(path, {"values": {}, **body}, content_type=JSON, headers={"If-Match": if_match})


def told(api: Client, rule: str, limit: str, org: str = "") -> tuple[float, str]:
    found = api.get(f"/api/v1/alert-rules/{rule}{f'?org={org}' if org else ''}").json()
    return next((one["value"], one["source"]) for one in found["thresholds"] if one["name"] == limit)


def test_thresholds_are_of_the_rule_then_of_all_then_of_an_org(
    people: People, api_of: Api, browser_of: Callable[..., Client]
) -> None:
    platform, org = api_of(people.platform_admin), api_of(people.org_admin)
    limit = "objective_seconds"
    assert told(org, "refill-slow", limit, "acme") == (0.25, "rule")
    assert thresholds(platform, "refill-slow", '"0"', values={limit: 0.5}).status_code == 200
    assert told(org, "refill-slow", limit, "acme") == (0.5, "all")
    made = thresholds(org, "refill-slow", '"0"', "acme", values={limit: 0.1}, reason="contract")
    assert made["ETag"] == '"1"'
    assert told(org, "refill-slow", limit, "acme") == (0.1, "org")
    assert told(platform, "refill-slow", limit) == (0.5, "all")
    stale = thresholds(org, "refill-slow", '"0"', "acme", values={limit: 0.2})
    assert (stale.status_code, stale["ETag"]) == (412, '"1"')
    same = thresholds(org, "refill-slow", '"1"', "acme", values={limit: 0.1})
    assert same["ETag"] == '"1"'
    assert len(audited("alerts.thresholds")) == 2
    entry = AuditEntry.objects.latest("pk")
    assert (entry.org_id, entry.reason) == (people.acme.pk, "contract")
    undone = browser_of(people.org_admin).post(f"/audit/{entry.pk}/undo/", {"reason": "mistake"})
    assert undone.status_code == 302
    assert told(org, "refill-slow", limit, "acme") == (0.5, "all")


def test_thresholds_that_make_no_sense_are_refused(people: People, api_of: Api) -> None:
    api = api_of(people.platform_admin)
    for values, pointer in (
        ({"nonsense": 1}, "/body/nonsense"),
        ({"objective_share": 1.5}, "/body/objective_share"),
        ({"objective_seconds": -1}, "/body/objective_seconds"),
    ):
        answer = thresholds(api, "refill-slow", "*", values=values)
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)
    assert not Thresholds.objects.exists()
    assert thresholds(api, "queue-deep", "*", "acme").status_code == 404, "nodes are not an org's"
    assert thresholds(api_of(people.org_admin), "refill-slow", "*").status_code == 403
    assert thresholds(api, "no-such-rule", "*").status_code == 404


def test_a_channel_says_nothing_of_its_secrets_and_only_platform_admins_change_it(
    people: People, api_of: Api
) -> None:
    api = api_of(people.platform_admin)
    body = {
        "name": "hook",
        "kind": "webhook",
        "address": "https://hooks.example.org/T/s3cret",
        "org": "acme",
    }
    made = api.post(
        "/api/v1/alert-channels",
        {**body, "secret": "s1gn"},
        content_type=JSON,
        headers={"Idempotency-Key": "k"},
    )
    assert made.status_code == 201
    assert made.json()["address"] == "https://hooks.example.org/…"
    path = f"/api/v1/alert-channels/{made.json()['id']}"
    changed = api.put(
        path,
        {"name": "hook 2", "matchers": ["rule=*"]},
        content_type=JSON,
        headers={"If-Match": made["ETag"]},
    )
    assert (changed.status_code, changed.json()["has_secret"], changed["ETag"]) == (200, True, '"2"')
    everything = changed.content + made.content + api.get("/api/v1/audit").content
    assert b"s3cret" not in everything
    assert b"s1gn" not in everything
    assert [
        one["name"] for one in api_of(people.viewer).get("/api/v1/alert-channels").json()["items"]
    ] == ["hook 2"]
    assert api_of(people.stranger).get(path).status_code == 404
    assert api.delete(path, headers={"If-Match": '"2"'}).status_code == 204
    assert len(audited("channel.create") + audited("channel.update") + audited("channel.delete")) == 3


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"kind": "webhook", "address": "file:///etc/passwd"}, "/body/address"),
        ({"kind": "webhook", "address": ""}, "/body/address"),
        ({"kind": "webhook", "address": "http://[::1"}, "/body/address"),
        ({"kind": "pagerduty"}, "/body/secret"),
        ({"kind": "slack", "address": "https://x.example/", "matchers": ["x"]}, "/body/matchers"),
        ({"kind": "email", "address": "ada@example.org"}, "/body/kind"),
    ],
)
def test_a_channel_that_could_be_told_nothing_is_refused(
    body: dict[str, Any], pointer: str, people: People, api_of: Api
) -> None:
    answer = api_of(people.platform_admin).post(
        "/api/v1/alert-channels",
        {"name": "x", **body},
        content_type=JSON,
        headers={"Idempotency-Key": "k"},
    )
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


@pytest.mark.usefixtures("contexts_of_pages")
def test_what_changed_shortly_before_is_told_to_those_who_may_know(
    people: People, browser_of: Callable[..., Client]
) -> None:
    from django.db import transaction

    from telemetry.events import note

    now = timezone.now()
    with transaction.atomic():
        note("policy.apply", ["org:acme"], "policy 7 of acme", at=now - timedelta(minutes=5))
        note("node.state", ["node:ax-7"], "ax-7 is draining", at=now - timedelta(minutes=4))
        note("policy.apply", ["org:acme"], "long ago", at=now - timedelta(hours=5))
        note("alert.firing", ["org:acme"], "another alert", at=now - timedelta(minutes=3))
    alert = make_alert("refill-slow", "org:acme", people.acme, begun_at=now)
    of_member = browser_of(people.viewer).get(f"/alerts/{alert.pk}/").context["changes"]
    assert [event.sentence for event in of_member] == ["policy 7 of acme"]
    of_platform = browser_of(people.platform_viewer).get(f"/alerts/{alert.pk}/").context["changes"]
    assert [event.sentence for event in of_platform] == ["ax-7 is draining", "policy 7 of acme"]


def test_the_charts_of_an_alert_that_is_over_are_shown_of_its_time(
    people: People, browser_of: Callable[..., Client]
) -> None:
    begun, over = datetime(2026, 11, 20, 3, tzinfo=UTC), datetime(2026, 11, 20, 4, 10, tzinfo=UTC)
    alert = make_alert(
        "refill-slow", "org:acme", people.acme, state="resolved", begun_at=begun, state_since=over
    )
    page = browser_of(people.viewer).get(f"/alerts/{alert.pk}/").content.decode()
    link = "?from=2026-11-20T02:30:00Z&amp;until=2026-11-20T04:40:00Z"
    assert f'<a href="{link}">Zoom to this alert</a>' in page


@pytest.mark.slow
def test_pages_of_every_rule_and_state_can_be_seen(
    people: People, browser_of: Callable[..., Client]
) -> None:
    """With charts and runbooks, whatever the rule reads."""
    from console.alerts.rules.catalogue import RULES

    browser = browser_of(people.platform_admin)
    make_channel("pager", "http://127.0.0.1:9/x")
    topics = {"org": "org:acme", "fleet": "fleet"}
    for rule in RULES:
        labels = {name: "x" for reading in rule.queries.values() for name in reading.by[:2]}
        topic = topics.get(rule.scope, f"{rule.scope}:x")
        alert = make_alert(rule.slug, topic, people.acme, labels=labels, severity=rule.severity)
        page = browser.get(f"/alerts/{alert.pk}/")
        assert page.status_code == 200, rule.slug
        assert "Meaning." in page.content.decode(), rule.slug
        assert browser.get(f"/alerts/rules/{rule.slug}/").status_code == 200
    assert browser.get("/alerts/channels/").status_code == 200


def test_pages_of_thresholds_and_channels_overwrite_nothing_unseen(
    people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.platform_admin)
    channel = make_channel("pager", "https://x.example/")
    of_channel = {"name": "pager", "min_severity": "notice", "enabled": "on"}
    for path, version, first, second, now in (
        (
            f"/alerts/channels/{channel.pk}/",
            1,
            {**of_channel, "matchers": "node=a"},
            of_channel,
            "node=a",
        ),
        ("/alerts/rules/refill-slow/", 0, {"objective_seconds": 2}, {"objective_seconds": 3}, "2.0"),
        ("/alerts/rules/refill-slow/", 1, {}, {"objective_seconds": 3}, "empty"),
        ("/alerts/rules/refill-slow/", 2, {"objective_seconds": 2, "enabled": "on"}, {}, "on"),
    ):
        assert f'name="version" value="{version}"' in browser.get(path).content.decode()
        assert browser.post(path, {**first, "version": version}).status_code == 302
        stale = browser.post(path, {**second, "version": version}).content.decode()
        assert "It has changed since you opened the form" in stale
        assert f"<p>Now: {now}.</p>" in stale
        assert f'name="version" value="{version + 1}"' in stale
    assert Channel.objects.get().matchers == ["node=a"]
    assert Thresholds.objects.get().values == {"objective_seconds": 2}
