"""The session rule that says how redundantly columns of tier 2 are stored."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from console.audit.models import AuditEntry
from console.environment import PROJECT
from console.placement.rules import Redundancy
from console.sessions.models import RuleSet
from console.sessions.rest.rules import RulesIn
from console.sessions.rules import effective_rules, effective_rules_of_all
from telemetry.events import events_of
from telemetry.models import Event
from telemetry.topics import FLEET
from tests.conftest import People
from tests.console.sessions.requests import set_rules

pytestmark = pytest.mark.django_db


def test_of_cluster_and_org_the_one_that_survives_more_losses_holds(people: People) -> None:
    assert effective_rules(people.acme).redundancy is Redundancy.NONE
    set_rules(people, redundancy="4+1")
    assert set_rules(people, people.globex, boxes_max=9).redundancy == "none", (
        "it adds nothing by itself"
    )
    assert set_rules(people, people.acme, redundancy="8+2").redundancy == "8+2"
    found = effective_rules_of_all()
    assert found(people.acme.pk).redundancy is Redundancy.EIGHT_AND_TWO
    assert found(people.globex.pk).redundancy is found(None).redundancy is Redundancy.FOUR_AND_ONE
    set_rules(people, people.acme, redundancy="none")
    assert effective_rules(people.acme).redundancy is Redundancy.FOUR_AND_ONE


def test_it_is_in_the_trail(people: People) -> None:
    set_rules(people, redundancy="4+2")
    entry = AuditEntry.objects.get(action="rules.update")
    assert (entry.before or {})["redundancy"] == "none"
    assert (entry.after or {})["redundancy"] == "4+2"
    event = Event.objects.get(kind="rules.update")
    assert event.sentence == "Rules of the cluster were changed: redundancy none to 4+2."
    assert event.data["audit_entry"] == entry.pk
    set_rules(people, people.acme, redundancy="8+2", replace_lost=False)
    assert [one.sentence for one in events_of(FLEET).filter(kind="rules.update").order_by("pk")] == [
        event.sentence,
        "Rules of acme were changed: redundancy none to 8+2, replace_lost on to off.",
    ], "alerts of the fleet have it among their recent changes"


def test_it_over_rest(people: People, api_of: Callable[..., Client]) -> None:
    client = api_of(people.platform_admin)
    address = "/api/v1/session-rules"
    rules = client.get(address).json()
    assert rules["redundancy"] == "none"

    def put_rules(**values: Any) -> Any:
        body = {**rules, **values}
        headers = {"If-Match": "*", "Idempotency-Key": str(values)}
        sent = {name: value for name, value in body.items() if name != "version"}
        return client.put(address, sent, content_type="application/json", headers=headers)

    assert put_rules(redundancy="4+1").json()["redundancy"] == "4+1"
    assert put_rules(redundancy=None).json()["redundancy"] == "4+1", "of a client that does not know it"
    assert put_rules(redundancy="3+3").status_code == 422
    assert RuleSet.objects.get(org=None).redundancy == "4+1"


def test_docs_say_what_a_put_takes(people: People, api_of: Callable[..., Client]) -> None:
    page = (PROJECT / "docs" / "sessions.md").read_text()
    client, address = api_of(people.platform_admin), "/api/v1/session-rules"
    rules = client.get(address).json()
    for name in re.findall(r"del\(\.(\w+)\)", page):
        del rules[name]
    rules |= {"redundancy": "2+1"}
    answer = client.put(address, rules, content_type="application/json", headers={"If-Match": "*"})
    assert (answer.status_code, answer.json()["redundancy"]) == (200, "2+1")
    [said] = re.findall(r"`PUT` replaces all of them\. ([^.]*) are required", page)
    needed = {name for name, field in RulesIn.model_fields.items() if field.is_required()}
    assert set(re.findall(r"`(\w+)`", said)) == needed


def test_it_on_its_page(people: People, browser_of: Callable[..., Client]) -> None:
    browser = browser_of(people.platform_admin)
    page = browser.get("/session-rules/").content.decode()
    assert "4+1: survives the loss of 1 agent, 25 % more bytes" in page
    form = {"path": "any", "wait_for_rail_seconds": 0, "boxes_min": 1, "boxes_increment": 1}
    form |= {"grant_percent": 100, "moves_percent": 25, "borrow": "no", "redundancy": "2+1"}
    form |= {"replace_lost_after_seconds": 20, "version": RuleSet(org=None).version}
    assert browser.post("/session-rules/", {**form, "reason": "disks fail"}).status_code == 302
    assert RuleSet.objects.get(org=None).redundancy == "2+1"
    page = browser.get("/session-rules/").content.decode()
    _, _, facts = page.partition("<dt>Redundancy</dt>")
    assert "2+1: survives" in facts.partition("</dd>")[0]
