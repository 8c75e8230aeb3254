"""What people may want of a workload, and what that reserves, makes and refuses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import InternalError, ProgrammingError, transaction
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import SYSTEM, Refused
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.fleet.models import Box, Node
from console.fleet.nodes import Impossible
from console.operations.models import Operation
from console.operations.services import StalePlan
from console.orgs.services import StillUsed, delete_org
from console.routing.models import ServedModel
from console.sessions import driver_orgs, rules
from console.sessions.changes import jobs, sizes
from console.sessions.models import Job, RuleSet, Session
from console.sessions.plans.proposals import CannotPlan
from console.sessions.services import for_change
from console.workloads import changes, lifecycle, services, spec
from console.workloads.models import Revision, Workload
from tests.conftest import People
from tests.console.sessions.fleets import make_driver, make_fleet
from tests.console.workloads.workloads import (
    a_rollout,
    an_instance,
    locked,
    make_workload,
    scale,
    settle,
    wanted,
)

ENGINE = {"emulator": {"operations_per_second": 2e15}}


@pytest.fixture(autouse=True)
def fleet(db: None) -> None:
    make_fleet(boxes=4)


def test_a_new_one_has_its_session_its_model_and_a_revision(people: People) -> None:
    principal = people.principal("org_admin")
    workload = make_workload(principal, org="acme", replicas=2)
    workload = services.get_workload(principal, "talk")
    session, served, revision = workload.session, workload.served, workload.revision
    assert session is not None
    assert (session.org, session.boxes_desired, session.boxes.count()) == (people.acme, 2, 2)
    assert session.bytes_per_token == 4 * 192
    assert served is not None
    assert (served.model, served.for_all_orgs) == ("example/chat-8b", False)
    assert served.org_slugs() == ["acme"]
    assert revision is not None
    assert (revision.number, revision.author_name) == (1, principal.name)
    assert workload.spec() == wanted(org="acme", replicas=2).whole
    assert [one.status for one in workload.conditions.all()] == ["Unknown"]
    entry = AuditEntry.objects.get(action="workload.create")
    assert (entry.org_id, entry.before, entry.actor_name) == (people.acme.pk, None, principal.name)


def test_what_is_shown_of_a_workload_is_the_whole_spec(people: People) -> None:
    """It is put together from kept parts, beside `spec`."""
    principal = people.principal("platform_admin")
    engine = {"arguments": ["--start-seconds", "1"], "environment": {"A": "1"}}
    made = make_workload(principal, org="acme", orgs=["acme"], engine=engine, boxes_per_replica=1)
    for _ in range(2):
        assert made.spec_shown() == spec.shown(made.spec())
        assert made.snapshot()["engine"]["environment"] == {"A": "set"}


def test_a_plan_says_boxes_memory_and_what_stays_for_others(people: People) -> None:
    RuleSet.objects.create(org=people.acme, path="any", boxes_quota=3)
    found = changes.plan_new(people.principal("org_admin"), wanted(org="acme", replicas=2))
    assert found.placement is not None
    assert [one.job for one in found.placement.worth] == ["talk-0", "talk-1"]
    assert min(one.tokens for one in found.placement.worth) > 0
    assert len(found.placement.streams) == 8
    assert (found.boxes, found.boxes_free, found.quota_left) == (2, 2, 1)
    assert not Session.objects.exists()


def test_a_plan_that_holds_is_applied_and_one_that_does_not_is_not(people: People) -> None:
    principal = people.principal("platform_admin")
    token = changes.plan_new(principal, wanted()).token
    changes.create(principal, wanted(), plan_token=token)
    settle()
    with pytest.raises(StalePlan):
        changes.create(principal, wanted(name="other", model="other"), plan_token=token)
    workload = locked(principal)
    token = changes.plan_change(principal, workload, wanted(replicas=2)).token
    changes.restart(principal, workload)
    with pytest.raises(StalePlan):
        changes.update(principal, workload, wanted(replicas=2), plan_token=token)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"replicas": 5}, "ExceedsClusterCapacity"),
        ({"boxes_per_replica": 3, "org": "acme"}, "ExceedsOrgQuota"),
    ],
)
def test_what_can_never_be_is_refused_at_once(
    people: People, more: dict[str, object], cause: str
) -> None:
    RuleSet.objects.create(org=people.acme, path="any", boxes_quota=2)
    with pytest.raises(CannotPlan) as refused:
        changes.create(people.principal("platform_admin"), wanted(**more))
    assert refused.value.cause.value == cause
    assert refused.value.cause.is_never


def test_what_others_have_is_waited_for_or_refused(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal, replicas=3)
    more = wanted(name="other", model="other", replicas=2)
    with pytest.raises(CannotPlan, match="2 more boxes are needed and 1 is free"), transaction.atomic():
        changes.create(principal, more)
    assert Workload.objects.count() == ServedModel.objects.count() == 1
    workload = changes.create(principal, more, wait_seconds=60)
    assert workload.session is not None
    assert workload.session.cause == "PendingEvaluation"


def test_names_are_taken_once(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal)
    for change in ({}, {"name": "other"}, {"model": "other"}):
        with pytest.raises(ValidationError):
            changes.create(principal, wanted(**change))
    Session.objects.create(name="by-hand", boxes_desired=1, boxes_min=1, boxes_increment=1)
    with pytest.raises(ValidationError, match="session by-hand"):
        changes.create(principal, wanted(name="by-hand", model="other"))


def test_who_may_make_one(people: People) -> None:
    for person in ("viewer", "on_call"):
        with pytest.raises(Refused):
            changes.plan_new(people.principal(person), wanted(org="acme"))
    with pytest.raises(Http404):
        changes.plan_new(people.principal("stranger"), wanted(org="acme"))
    admin = people.principal("org_admin")
    with pytest.raises(Refused):
        changes.plan_new(admin, wanted())
    with pytest.raises(spec.Wrong, match="for that org only"):
        wanted(org="acme", orgs=["acme", "globex"])


@pytest.mark.parametrize(
    "more",
    [
        {"engine": {"kind": "command", "command": ["sh"], "emulator": None}},
        {"engine": {"arguments": ["--x"]}},
        {"engine": {"environment": {"LD_PRELOAD": "/x"}}},
        {"weights": {"source": "/etc"}},
        {"weights": {"source": "s3://b/p", "endpoint": "http://10.0.0.1"}},
        {"tokenizer": {"folder": "/etc"}},
        {"cache": {"enabled": False}, "boxes_per_replica": 0},
    ],
)
def test_what_touches_machines_is_for_platform_admins(people: People, more: dict[str, object]) -> None:
    with pytest.raises(Refused, match="Only a platform admin sets"):
        changes.create(people.principal("org_admin"), wanted(org="acme", **more))
    make_workload(people.principal("platform_admin"), org="acme", **more)
    # Its admin changes the rest.
    admin = people.principal("org_admin")
    changes.update(admin, locked(admin), wanted(org="acme", tokens_max=1024, **more))


def test_a_change_of_the_template_is_a_revision_and_others_are_not(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal)
    workload = changes.update(principal, locked(principal), wanted(rollout={"max_surge": 2}))
    assert (workload.revision and workload.revision.number, workload.version) == (1, 2)
    assert workload.rollout.max_surge == 2
    workload = changes.update(principal, workload, wanted(engine=ENGINE, rollout={"max_surge": 2}))
    assert workload.revision is not None
    assert (workload.revision.number, workload.generation) == (2, 3)
    before = workload.version
    workload = changes.update(principal, workload, wanted(engine=ENGINE, rollout={"max_surge": 2}))
    assert workload.version == before


def test_brains_are_told_the_shorter_context_until_a_rollout_is_complete(people: People) -> None:
    principal = people.principal("platform_admin")
    workload = make_workload(principal)
    workload.stable = workload.revision
    workload.save()
    changes.update(principal, workload, wanted(tokens_max=65536))
    assert ServedModel.objects.get().tokens_max == 32768
    workload.stable = workload.revision
    changes.fit_model(workload)
    assert ServedModel.objects.get().tokens_max == 65536
    changes.update(principal, workload, wanted(tokens_max=1024))
    assert ServedModel.objects.get().tokens_max == 1024


def test_what_names_it_never_changes(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal)
    with pytest.raises(ValidationError) as refused:
        changes.update(principal, locked(principal), wanted(model="other", boxes_per_replica=2))
    assert sorted(refused.value.message_dict) == ["boxes_per_replica", "model"]


def test_more_replicas_take_boxes_at_once_and_fewer_keep_them_for_now(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal, replicas=2)
    workload = scale(principal, locked(principal), 3)
    settle()
    session = Session.objects.get()
    assert (session.boxes_desired, workload.replicas) == (3, 3)
    scale(principal, workload, 1)
    assert Session.objects.get().boxes_desired == 3, "until their instances have ended"


def test_quotas_hold_for_scaling(people: People) -> None:
    admin = people.principal("org_admin")
    make_workload(admin, org="acme")
    rules.set_rules(SYSTEM, rules.for_change(SYSTEM, people.acme), {"boxes_quota": 2})
    with pytest.raises(CannotPlan, match="quota of Acme is 2 boxes"):
        scale(admin, locked(admin), 3)
    scale(admin, locked(admin), 2)


def test_replicas_have_a_quota_also_without_boxes(people: People) -> None:
    admin, platform = people.principal("org_admin"), people.principal("platform_admin")
    without = {"org": "acme", "cache": {"enabled": False}, "boxes_per_replica": 0}
    make_workload(platform, **without, replicas=2)
    with pytest.raises(Refused):
        rules.set_rules(admin, rules.for_change(admin, people.acme), {"replicas_quota": 9})
    with pytest.raises(Impossible, match="Acme has 2 replicas, more than a quota of 1: scale"):
        rules.set_rules(platform, rules.for_change(platform, people.acme), {"replicas_quota": 1})
    rules.set_rules(platform, rules.for_change(platform, people.acme), {"replicas_quota": 3})
    for change in (
        lambda: scale(admin, locked(admin), 5),
        lambda: changes.plan_change(admin, locked(admin), wanted(**without, replicas=5)),
    ):
        with pytest.raises(CannotPlan) as refused:
            change()
        assert refused.value.cause.is_never
        assert str(refused.value) == (
            "The quota of Acme is 3 replicas, its other workloads have 0, and 5 are requested: "
            "2 too many. Request at most 3, scale another workload down, or have a platform admin raise "
            "the quota."
        )
    more = wanted(name="more", model="more", org="acme", replicas=2)
    for begin in (changes.plan_new, changes.create):
        with pytest.raises(CannotPlan, match=r"1 too many\. Request at most 1"):
            begin(platform, more)
    assert changes.plan_change(admin, locked(admin), wanted(**without, replicas=1)).replicas_left == 2
    scale(admin, locked(admin), 3)
    scale(admin, locked(admin), 1)


def test_a_roll_back_is_a_new_revision_that_equals_an_old_one(people: People) -> None:
    principal = people.principal("on_call")
    workload = make_workload(people.principal("org_admin"), org="acme", replicas=2)
    first = workload.revision
    assert first is not None
    Revision.objects.filter(pk=first.pk).update(epoch=3, artifact="a" * 64, layout={"groups": []})
    changes.update(SYSTEM, workload, wanted(engine=ENGINE, org="acme"))
    workload = services.for_change(principal, "talk", Role.ON_CALL)
    workload = changes.roll_back(principal, workload)
    latest = workload.revision
    assert latest is not None
    assert (latest.number, latest.same_as, latest.digest) == (3, 1, first.digest)
    assert (latest.epoch, latest.artifact) == (3, "a" * 64)
    assert workload.replicas == 1  # which is no part of a revision
    with pytest.raises(Impossible, match="is what talk is to run now"):
        changes.roll_back(principal, workload, 1)
    with pytest.raises(Http404):
        changes.roll_back(principal, workload, 17)


def test_a_roll_back_without_a_number_goes_to_what_ran_last(people: People) -> None:
    principal = people.principal("platform_admin")
    workload = make_workload(principal)
    a_rollout(workload, phase="done", ended_at=workload.created_at)
    for speed in (2e15, 3e15):
        more = {"emulator": {"operations_per_second": speed}}
        changes.update(principal, workload, wanted(engine=more))
    changes.roll_back(principal, workload)
    assert workload.revision is not None
    assert workload.revision.same_as == 1


def test_nobody_goes_back_to_what_was_rolled_back(people: People) -> None:
    principal = people.principal("platform_admin")
    workload = make_workload(principal)
    a_rollout(workload, phase="done", ended_at=workload.created_at)
    changes.update(principal, workload, wanted(engine=ENGINE))
    a_rollout(workload, phase="undone", ended_at=workload.created_at)
    workload.stable = changes.roll_back(principal, workload).revision
    lifecycle.forget_old(timezone.now() + timedelta(days=365))
    with pytest.raises(Impossible, match="has no earlier revision to roll back to"):
        changes.roll_back(principal, workload)


def test_pausing_and_restarting_count(people: People) -> None:
    principal = people.principal("platform_admin")
    workload = make_workload(principal)
    for change in (changes.pause, changes.pause, changes.resume, changes.restart):
        change(principal, workload, reason="Because.")
    assert (workload.paused, workload.restarts, workload.version) == (False, 1, 4)
    actions = AuditEntry.objects.filter(object_type="workload").order_by("pk")
    assert list(actions.values_list("action", flat=True)) == [
        *("workload.create", "workload.pause", "workload.resume", "workload.restart")
    ]


def test_a_deleted_one_goes_with_its_session_and_its_model(people: People) -> None:
    principal = people.principal("platform_admin")
    workload = changes.delete(principal, make_workload(principal))
    with pytest.raises(Impossible, match="is being deleted"):
        locked(principal)
    assert not lifecycle.release(workload)
    settle()
    workload.refresh_from_db()
    assert lifecycle.release(workload)
    lifecycle.forget(workload)
    assert not Session.objects.exists()
    assert not ServedModel.objects.exists()
    assert not Revision.objects.exists()
    assert AuditEntry.objects.filter(action="workload.deleted").count() == 1


def test_its_session_is_deleted_with_it_only(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal)
    with pytest.raises(Impossible, match="Delete the workload instead"):
        sizes.delete(principal, for_change(principal, "talk"), end_jobs=True)


def test_its_session_is_resized_with_it_only(people: People) -> None:
    """The orchestrator would give it the workload's size again, and say to nobody why."""
    principal = people.principal("platform_admin")
    make_workload(principal)
    settle()
    session = for_change(principal, "talk")
    with pytest.raises(Impossible, match="Scale the workload instead"):
        sizes.plan_resize(session, 2)
    sizes.plan_resize(session, 1)  # which divides memory anew


def test_its_session_keeps_the_boxes_that_instances_run_on_without_a_job(people: People) -> None:
    principal = people.principal("platform_admin")
    workload = make_workload(principal, replicas=3, cache={"enabled": False})
    settle()
    session = for_change(principal, "talk")
    boxes = list(session.boxes.values_list("box__name", flat=True))
    an_instance(workload, 1, boxes=boxes, ended_at=timezone.now())
    one = an_instance(workload)
    for box in boxes:
        one.boxes = [box]
        one.save()
        assert sizes.plan_size(session, 1).boxes == (box,)
        Box.objects.filter(name=box).update(state="cordoned")
        assert sizes.plan_size(session, 1).boxes == (box,)
        Box.objects.filter(name=box).update(state="ready")
    an_instance(workload, 1, boxes=boxes[:1])
    with pytest.raises(CannotPlan, match="2 of its boxes are in use, more than the new size of 1"):
        sizes.plan_size(session, 1)


def test_a_deleted_one_waits_for_no_boxes(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal, replicas=4)
    waits = changes.create(principal, wanted(name="other", model="other"), wait_seconds=3600)
    settle()
    changes.delete(principal, waits)
    for _ in range(4):
        if lifecycle.release(waits):
            break
        settle()
        waits.refresh_from_db()
    assert not Session.objects.filter(name="other").exists()


def test_orgs_are_let_in_and_out_of_a_shared_one(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal)
    assert ServedModel.objects.get().for_all_orgs
    workload = changes.update(principal, locked(principal), wanted(orgs=["acme", "globex"]))
    assert ServedModel.objects.get().org_slugs() == ["acme", "globex"]
    with pytest.raises(ValidationError, match="There is no org none"):
        changes.update(principal, workload, wanted(orgs=["none"]))
    changes.update(principal, workload, wanted(orgs=["acme"]))
    assert ServedModel.objects.get().org_slugs() == ["acme"]
    assert workload.revision is not None
    assert workload.revision.number == 1


def test_a_job_that_has_waited_is_for_those_that_its_workload_is_for_by_now(people: People) -> None:
    principal = people.principal("platform_admin")
    make_workload(principal, orgs=["acme", "globex"])
    driver = make_driver("talk-1-0", workload="talk")
    states = list(Node.objects.values_list("pk", "state"))
    Node.objects.update(state="cordoned")
    with transaction.atomic():
        jobs.start_job(
            *(SYSTEM, for_change(SYSTEM, "talk"), "talk-1-0", driver),
            orgs=["acme", "globex"],
            wait_seconds=3600,
        )
    settle()
    assert not Job.objects.exists()
    changes.update(principal, locked(principal), wanted(orgs=["acme"]))
    for pk, state in states:
        Node.objects.filter(pk=pk).update(state=state)
    for _ in range(5):
        Operation.objects.update(wake_at=timezone.now())
        settle()
    assert Job.objects.get().driver == driver
    assert driver_orgs.slugs(driver_orgs.orgs_of(driver)) == ["acme"]


def test_an_org_that_a_workload_is_for_is_taken_off_it_before_it_goes(people: People) -> None:
    principal = people.principal("platform_admin")
    workload = make_workload(principal, orgs=["acme", "globex"])
    with pytest.raises(StillUsed, match="may use workload talk: take it off that first"):
        delete_org(principal, people.globex)
    changes.update(principal, workload, wanted(orgs=["acme"]))
    delete_org(principal, people.globex)


def test_a_revision_is_never_changed_but_what_its_compile_job_found_is_added(people: People) -> None:
    revision = make_workload().revision
    assert revision is not None
    same = Revision.objects.filter(pk=revision.pk)
    forbidden: list[dict[str, Any]] = [{"template": {}}, {"note": "x"}, {"number": 7}]
    for change in forbidden:
        with pytest.raises((InternalError, ProgrammingError)), transaction.atomic():
            same.update(**change)
    same.update(artifact="a" * 64, epoch=1)
    with pytest.raises((InternalError, ProgrammingError)), transaction.atomic():
        same.update(epoch=2)


def test_variables_of_engines_are_not_in_the_trail(people: People) -> None:
    make_workload(engine={"environment": {"TOKEN": "hush"}})
    found = changes.plan_change(SYSTEM, locked(SYSTEM), wanted(engine={"environment": {"TOKEN": "hm"}}))
    assert [(one.field, one.after) for one in found.differences] == [("engine.environment.TOKEN", "set")]
    assert "hush" not in str(list(AuditEntry.objects.values()))


def test_strangers_see_none(people: People) -> None:
    make_workload(org="acme")
    assert [one.name for one in services.visible_workloads(people.principal("viewer"))] == ["talk"]
    assert not services.visible_workloads(people.principal("stranger"))
    with pytest.raises(Http404):
        services.get_workload(people.principal("stranger"), "talk")
    found = services.find_workloads(people.principal("viewer"), "tal", 5)
    assert [(one.name, one.detail) for one in found] == [("talk", "example/chat-8b, 1 replica")]
    assert spec.parse(spec.dump(services.get_workload(SYSTEM, "talk").spec())).org == "acme"
