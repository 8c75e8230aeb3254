"""Sessions of boxes: what is granted, refused and waited for, by rules that nobody gets round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.test import Client

from console.audit import services as audit
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo
from console.fleet.models import Node
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.core import State
from console.operations.services import StalePlan
from console.orgs.models import Org
from console.placement.rules import Cause
from console.sessions import services
from console.sessions.changes import sizes
from console.sessions.models import RuleSet, Session
from console.sessions.plans.proposals import CannotPlan
from telemetry.models import Event
from tests.conftest import People
from tests.console.operations.runs import run
from tests.console.sessions.fleets import make_box, make_fleet, make_node
from tests.console.sessions.requests import boxes_of, create, resize, set_rules

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fleet(db: None) -> None:
    make_fleet()


def test_a_session_is_made_grown_and_shrunk(people: People) -> None:
    made = run(create(people))
    assert (made.state, made.response) == (State.SUCCEEDED, {"session": "chat", "boxes": ["cs1", "cs2"]})
    assert run(resize(people, 4)).response == {
        "session": "chat",
        "boxes": ["cs1", "cs2", "cs3", "cs4"],
    }
    assert len(run(resize(people, 1)).response["boxes"]) == 1  # type: ignore[index]
    session = Session.objects.get()
    assert services.sizes(session) == services.Sizes(desired=1, granted=1, actual=1)


@pytest.mark.parametrize(
    ("boxes", "cause"),
    [
        (1, Cause.BELOW_MINIMUM_SIZE),
        (3, Cause.NOT_MULTIPLE_OF_INCREMENT),
        (6, Cause.EXCEEDS_MAXIMUM),
    ],
)
def test_what_rules_forbid_is_never_made(people: People, boxes: int, cause: Cause) -> None:
    for number in range(5, 9):
        make_box(f"cs{number}")
    set_rules(people, boxes_min=2, boxes_increment=2, boxes_max=4)
    with pytest.raises(CannotPlan) as refused:
        create(people, boxes=boxes, wait_seconds=3600)
    assert refused.value.cause is cause
    assert cause.is_never
    assert not Session.objects.exists()


def test_the_fleet_and_the_quota_of_an_org_bound_it(people: People) -> None:
    with pytest.raises(CannotPlan) as refused:
        create(people, boxes=5, wait_seconds=3600)
    assert refused.value.cause is Cause.EXCEEDS_CLUSTER_CAPACITY
    set_rules(people, people.acme, boxes_quota=3)
    create(people, boxes=2)
    with pytest.raises(CannotPlan) as refused:
        create(people, "another", boxes=2)
    assert refused.value.cause is Cause.EXCEEDS_ORG_QUOTA
    assert "request at most 1" in refused.value.sentence
    set_rules(people, people.globex, boxes_quota=1)
    with pytest.raises(CannotPlan, match=r"is 1 box, and its other sessions have 0: request at most 1,"):
        create(people, "of-globex", boxes=2, org=people.globex)
    set_rules(people, people.globex, boxes_quota=None)
    create(people, "of-globex", boxes=2, org=people.globex)
    with pytest.raises(ValidationError, match="set one for each org"):
        set_rules(people, None, boxes_quota=3)


def test_it_waits_for_boxes_and_gets_them_when_others_give_them_back(people: People) -> None:
    run(create(people, "first", boxes=3))
    with pytest.raises(CannotPlan) as refused:
        create(people, "second", boxes=2)
    assert (refused.value.cause, refused.value.cause.is_never) == (Cause.WAITING_FOR_CAPACITY, False)
    waiting = run(create(people, "second", boxes=2, wait_seconds=3600))
    second = Session.objects.get(name="second")
    assert (waiting.state, second.cause) == (State.RUNNING, "WaitingForCapacity")
    assert "1 is free" in second.cause_sentence
    assert services.sizes(second) == services.Sizes(desired=2, granted=0, actual=0)
    assert services.sizes(second).held == 2
    run(resize(people, 1, "first"))
    assert run(waiting).state == State.SUCCEEDED
    second.refresh_from_db()
    assert (second.cause, second.waiting_since, len(boxes_of("second"))) == ("", None, 2)


def test_a_fleet_whose_agents_have_not_joined_yet_is_waited_for(people: People) -> None:
    Node.objects.update(memory_bytes=0)
    with pytest.raises(CannotPlan, match="No node has reported memory yet") as refused:
        create(people)
    assert not refused.value.cause.is_never
    waiting = run(create(people, wait_seconds=3600))
    Node.objects.update(memory_bytes=1 << 30)
    assert run(waiting).state == State.SUCCEEDED


def test_waiting_that_is_cancelled_leaves_nothing(people: People) -> None:
    run(create(people, "first", boxes=3))
    waiting = run(create(people, "second", boxes=2, wait_seconds=3600))
    operations.cancel(people.principal("platform_admin"), waiting.pk)
    assert run(waiting).state == State.CANCELLED
    assert not Session.objects.filter(name="second").exists()
    growing = run(resize(people, 4, "first"))
    assert growing.state == State.SUCCEEDED


def test_a_resize_that_is_cancelled_returns_to_the_size_before(people: People) -> None:
    run(create(people, "first", boxes=3))
    run(create(people, "second", boxes=1))
    waiting = run(resize(people, 4, "first", wait_seconds=3600))
    assert Session.objects.get(name="first").boxes_desired == 4
    operations.cancel(people.principal("platform_admin"), waiting.pk)
    assert run(waiting).state == State.CANCELLED
    first = Session.objects.get(name="first")
    assert (first.boxes_desired, first.cause, len(boxes_of("first"))) == (3, "", 3)
    assert first.version == 3  # made, asked to grow, and told not to: who saw it grow has not seen this


def test_require_rail_waits_for_one_and_the_switch_refuses_the_spine(people: People) -> None:
    Node.objects.update(state="cordoned")
    make_node("bx1", "far", memory_bytes=4 << 30)
    set_rules(people, path="require_rail")
    with pytest.raises(CannotPlan) as refused:
        create(people, boxes=1)
    assert refused.value.cause is Cause.WAITING_FOR_RAIL
    assert not refused.value.cause.is_never
    set_rules(people, path="any", refuse_spine=True)
    with pytest.raises(CannotPlan) as refused:
        create(people, boxes=1)
    assert refused.value.cause is Cause.SPINE_REFUSED_BY_RULE
    set_rules(people, refuse_spine=False)
    assert run(create(people, boxes=1)).state == State.SUCCEEDED


def test_rules_are_never_stricter_than_the_sessions_that_there_are(people: People) -> None:
    run(create(people, boxes=3))
    with pytest.raises(Impossible) as refused:
        set_rules(people, boxes_increment=2)
    assert "chat with 3 boxes" in str(refused.value)
    with pytest.raises(Impossible):
        set_rules(people, people.acme, boxes_min=4)
    with pytest.raises(Impossible):
        set_rules(people, people.acme, boxes_quota=2)
    set_rules(people, people.globex, boxes_min=4)
    set_rules(people, boxes_increment=3)
    assert Session.objects.get().boxes_increment == 3


def test_rules_of_a_former_org_are_not_undone_for_the_next_one_of_its_name(
    people: People,
) -> None:
    admin = people.principal("platform_admin")
    org = Org.objects.create(slug="initech", name="Initech")
    set_rules(people, org, boxes_quota=5)
    set_rules(people, org, boxes_quota=None)
    entry = AuditEntry.objects.filter(action="rules.update").latest("pk")
    org.delete()
    Org.objects.create(slug="initech", name="Another")
    with pytest.raises(CannotUndo, match="no longer exists"):
        audit.undo(admin, entry, "")
    assert not RuleSet.objects.exists()


def test_the_page_resizes_no_session_that_was_changed_since_it_was_shown(
    people: People, browser_of: Callable[..., Client]
) -> None:
    run(create(people))
    olga, page = browser_of(people.org_admin), "/sessions/chat/resize/"
    version = Session.objects.get().version
    assert f'name="version" value="{version}"' in olga.get(page).content.decode()
    run(resize(people, 4))
    form = {"boxes": 3, "wait_minutes": 0, "version": version}
    refused = olga.post(page, form).content.decode()
    assert "It has changed since you opened the form." in refused
    assert "<p>Now: 4.</p>" in refused
    assert Session.objects.get().boxes_desired == 4
    version = Session.objects.get().version
    assert f'name="version" value="{version}"' in refused, "who has looked again may save"
    assert olga.post(page, form | {"version": version}).status_code == 302
    assert Session.objects.get().boxes_desired == 3


def test_the_database_itself_refuses_a_size_off_the_rules(people: People) -> None:
    set_rules(people, boxes_min=2, boxes_increment=2, boxes_max=4)
    run(create(people, boxes=2))
    for boxes in (0, 1, 3, 6):
        with pytest.raises(IntegrityError), transaction.atomic():
            Session.objects.update(boxes_desired=boxes)


def test_a_plan_holds_only_while_the_world_is_as_it_was(people: People) -> None:
    with transaction.atomic():
        plan = sizes.plan_size(sizes.new_session("chat", people.acme, 2), 2)
    assert (plan.added, plan.is_trial, plan.paths) == (
        ("cs1", "cs2"),
        True,
        {"rail": 8, "leaf": 0, "spine": 0},
    )
    run(create(people, "other", boxes=1))
    with pytest.raises(StalePlan):
        create(people, plan_token=plan.token)
    with transaction.atomic():
        plan = sizes.plan_size(sizes.new_session("chat", people.acme, 2), 2)
    run(create(people, plan_token=plan.token))
    assert boxes_of() == list(plan.added)


def test_a_name_is_had_by_one_session_and_others_are_told_so(people: People) -> None:
    create(people)
    with pytest.raises(ValidationError, match="There is a session chat already"):
        create(people)


def test_one_operation_at_a_time_works_on_a_session(people: People) -> None:
    run(create(people, "first", boxes=3))
    waiting = run(create(people, "second", boxes=2, wait_seconds=3600))
    with pytest.raises(operations.Busy) as busy:
        resize(people, 1, "second")
    assert busy.value.operation.pk == waiting.pk


def test_what_was_asked_for_is_told_in_words(people: People) -> None:
    run(create(people, boxes=1))
    run(resize(people, 2))
    told = Event.objects.filter(kind="session.resize").get()
    assert told.sentence == "Resize session chat from 1 to 2 boxes."
    assert AuditEntry.objects.get(action="session.resize").after["boxes"] == 2  # type: ignore[index]


def test_deleting_gives_the_boxes_back(people: People) -> None:
    run(create(people))
    admin = people.principal("platform_admin")
    with transaction.atomic():
        operation = sizes.delete(admin, services.for_change(admin, "chat"))
    assert run(operation).state == State.SUCCEEDED
    assert not Session.objects.exists()
    assert run(create(people, "next", boxes=4)).state == State.SUCCEEDED
