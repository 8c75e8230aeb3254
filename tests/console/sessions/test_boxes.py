"""Boxes that are cordoned and drained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import transaction
from django.test import Client

from console.accounts.principal import SYSTEM
from console.accounts.roles import Role
from console.audit import services as audit
from console.audit.models import AuditEntry
from console.fleet import boxes
from console.fleet import services as fleet
from console.fleet.models import Box
from console.operations import services as operations
from console.operations.models import Operation
from console.placement.topology import State
from console.sessions import services
from console.sessions.changes import box_drains, jobs
from console.sessions.models import Job, Session
from console.sessions.plans.proposals import CannotPlan
from tests.conftest import People
from tests.console.operations.runs import run
from tests.console.sessions.fleets import make_driver, make_fleet
from tests.console.sessions.obeying import obeying
from tests.console.sessions.requests import boxes_of, create, resize, start_job

pytestmark = pytest.mark.django_db
Browser = Callable[..., Client]


@pytest.fixture(autouse=True)
def _all_obey() -> Iterator[None]:
    with obeying():
        yield


@transaction.atomic
def be(name: str, state: State, reason: str = "loud fan") -> Box:
    box = fleet.for_change(SYSTEM, fleet.visible_boxes, name, Role.ON_CALL)
    return boxes.set_state(SYSTEM, box, state, reason=reason)


def finished(operation: Operation) -> Operation:
    for _ in range(20):
        run(operation)
    return operation


def test_a_cordoned_box_is_given_to_nobody_and_starts_no_job(people: People) -> None:
    make_fleet(boxes=3)
    be("cs1", State.CORDONED)
    run(create(people, boxes=2))
    assert boxes_of() == ["cs2", "cs3"]
    with pytest.raises(CannotPlan, match="1 other takes nothing new") as refused:
        resize(people, 3)
    assert "cs1" not in refused.value.sentence
    assert "these take nothing new: cs1. Uncordon one" in refused.value.with_names
    assert (refused.value.cause.value, refused.value.cause.is_never) == ("BoxCordoned", False)
    be("cs2", State.CORDONED)
    driver = make_driver("job7")
    with pytest.raises(CannotPlan, match="cs2") as refused:
        start_job(people, driver, boxes=["cs2"])
    assert refused.value.cause.value == "BoxCordoned"
    finished(start_job(people, driver))
    assert list(Job.objects.values_list("boxes__session_box__box__name", flat=True)) == ["cs3"]
    finished(resize(people, 1))
    assert boxes_of() == ["cs3"], "that one runs a job"
    be("cs1", State.READY)
    finished(resize(people, 2))
    assert boxes_of() == ["cs1", "cs3"]


def test_a_box_is_drained_once_its_jobs_are_ended_and_the_session_has_another_one(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fleet(boxes=3)
    run(create(people, boxes=2))
    finished(start_job(people, make_driver("job7"), boxes=["cs1"]))
    drained = run(box_drains.drain(SYSTEM, "cs1", reason="loud fan"))
    assert drained.message == "Job serve of session chat runs there: end it."
    session = Session.objects.get()
    assert services.boxes_to_leave(session) == {"cs1": ["serve"]}
    monkeypatch.setattr(services, "_movers", [lambda job: f"Workload {job.session.name} moves it."])
    assert finished(drained).message == "Workload chat moves it."
    with pytest.raises(operations.Busy):
        be("cs1", State.READY)
    with transaction.atomic():
        ending = jobs.end_job(SYSTEM, services.for_change(SYSTEM, "chat"), "serve")
    finished(ending)
    assert finished(drained).state == "succeeded"
    assert drained.response == {"box": "cs1", "session": "chat", "instead": "cs3"}
    assert boxes_of() == ["cs2", "cs3"]
    assert Box.objects.get(name="cs1").state == "draining"
    assert services.boxes_to_leave(session) == {}


def test_a_drain_that_is_cancelled_leaves_the_box_as_it_was(people: People) -> None:
    make_fleet(boxes=1)
    run(create(people, boxes=1))
    drained = run(box_drains.drain(SYSTEM, "cs1"))
    assert "1 more box is needed and none is free" in drained.message
    operations.cancel(SYSTEM, drained.pk)
    assert run(drained).state == "cancelled"
    assert (boxes_of(), Box.objects.get().state) == (["cs1"], "ready")


def test_what_was_done_to_a_box_is_in_the_trail_and_can_be_undone(people: People) -> None:
    make_fleet(boxes=1)
    be("cs1", State.CORDONED)
    entry = AuditEntry.objects.get(action="box.state")
    assert (entry.reason, entry.object_name) == ("loud fan", "cs1")
    audit.undo(people.principal("platform_on_call"), entry, "it is quiet again")
    assert Box.objects.get().state == "ready"


def test_boxes_over_rest_and_on_their_page(people: People, api_of: Browser, browser_of: Browser) -> None:
    make_fleet(boxes=1)
    on_call: Any = api_of(people.platform_on_call)
    told = {"state": "cordoned", "reason": "loud fan"}
    answer = on_call.put("/api/v1/boxes/cs1/state", told, content_type="application/json")
    assert (answer.status_code, answer.json()["state"]) == (200, "cordoned")
    page = browser_of(people.platform_on_call)
    assert "loud fan" in page.get("/fleet/boxes/cs1/").content.decode()
    assert "cordoned" in page.get("/fleet/boxes/").content.decode()
    page.post("/fleet/boxes/cs1/state/", {"state": "ready"})
    assert Box.objects.get().state == "ready"
    page.post("/fleet/boxes/cs1/drain/", {"reason": "loud fan"})
    drained = run(Operation.objects.get(kind="box.drain"))
    assert (drained.state, drained.message) == ("succeeded", "No session has cs1.")
    assert "draining" in page.get("/fleet/boxes/cs1/").content.decode()
    headers = {"Idempotency-Key": "k"}
    again = on_call.post("/api/v1/boxes/cs1/drain", {}, content_type="application/json", headers=headers)
    assert again.status_code == 202


@pytest.mark.parametrize("query", ["", "?validate_only=true"])
def test_a_cordoned_box_is_named_to_those_who_see_the_fleet_and_to_no_others(
    people: People, api_of: Browser, browser_of: Browser, query: str
) -> None:
    make_fleet(boxes=2)
    be("cs1", State.CORDONED)
    said = {}
    for who in (people.platform_admin, people.org_admin):
        answer = api_of(who).post(
            f"/api/v1/sessions{query}",
            {"name": "chat", "org": "acme", "boxes": 2},
            content_type="application/json",
            headers={"Idempotency-Key": "k"},
        )
        assert (answer.status_code, answer.json()["reason"]) == (409, "BoxCordoned")
        said[who.username] = answer.json()["detail"]
        form = {"name": "chat", "org": "acme", "boxes": 2, "kib_per_token": 64, "wait_minutes": 0}
        page = browser_of(who).post("/new-session/", {**form, "preview": "1"}).content.decode()
        assert said[who.username] in page
    named, counted = said.values()
    assert "these take nothing new: cs1. Uncordon one" in named
    assert "2 more needed and 1 free; 1 other takes nothing new." in counted
    assert "cs1" not in counted


def test_what_a_session_that_waits_tells_everybody_names_no_box(people: People) -> None:
    make_fleet(boxes=2)
    be("cs1", State.CORDONED)
    waiting = run(create(people, boxes=2, wait_seconds=600))
    for sentence in (Session.objects.get().cause_sentence, waiting.message):
        assert "1 other takes nothing new" in sentence
        assert "cs1" not in sentence


def test_undo_of_a_cordon_leaves_the_cordon_that_somebody_else_made_since(people: People) -> None:
    make_fleet(boxes=1)
    be("cs1", State.CORDONED)
    entry = AuditEntry.objects.get(action="box.state")
    be("cs1", State.READY)
    be("cs1", State.CORDONED, "smoke: do not use")
    with pytest.raises(audit.CannotUndo, match="cs1 is cordoned for another reason by now"):
        audit.undo(people.principal("platform_on_call"), entry, "")
    assert Box.objects.get().state_reason == "smoke: do not use"
