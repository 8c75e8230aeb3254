"""Scheduled policies that overlap: what is active when, whatever fails or is late."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from unittest import mock

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models.signals import pre_save
from django.http import Http404
from django.test import Client
from django.utils import timezone
from hypothesis import example, given, settings
from hypothesis import strategies as st

from console.accounts.models import User
from console.control import services as control
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import documents, schedule, services
from console.policies.documents import ClusterPolicies, Limits
from console.policies.models import PolicyInForce, PolicyVersion, ScheduledPolicy
from swdriver_shim.policy import OrgPolicies, Policy
from tests.conftest import People, make_people

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
State = ScheduledPolicy.State


def save(people: People, seconds: int, by: str = "org_admin") -> None:
    principal = people.principal(by)
    wanted = OrgPolicies(policy=Policy(ttl_last_use_seconds=seconds))
    with transaction.atomic():
        services.set_policy(principal, orgs.for_change(principal, "acme"), wanted, reason="asked for")


def plan(
    people: People, starts_at: datetime, lasts: timedelta | None, seconds: int, slug: str = "acme"
) -> ScheduledPolicy:
    principal = people.principal("platform_admin")
    wanted = OrgPolicies(policy=Policy(ttl_last_use_seconds=seconds))
    with transaction.atomic():
        org = orgs.for_change(principal, slug)
        return schedule.schedule(
            principal, org, wanted, starts_at=starts_at, lasts=lasts, reason="an audit"
        )


def end(people: People, planned: ScheduledPolicy) -> None:
    principal = people.principal("org_admin")
    with transaction.atomic():
        schedule.take_back(principal, orgs.for_change(principal, "acme"), planned.pk)


def limit(people: People, seconds: int) -> None:
    told = ClusterPolicies(
        default=Policy(ttl_last_use_seconds=1), limits=Limits(ttl_last_use_seconds_max=seconds)
    )
    services.set_cluster(people.principal("platform_admin"), told, reason="a contract")


def said(org: Org) -> int | None:
    return services.active_policy(org).said.policy.ttl_last_use_seconds


def states() -> list[str]:
    return list(ScheduledPolicy.objects.order_by("pk").values_list("state", flat=True))


@contextmanager
def failing(*numbers: int) -> Iterator[None]:
    """The steps of these do not succeed."""
    step = schedule._step

    def run(number: int, org: Org, now: datetime) -> bool:
        if number in numbers:
            step(number, org, now)
            raise OperationalError("canceling statement due to lock timeout")
        return step(number, org, now)

    with mock.patch.object(schedule, "_step", run):
        yield


# Against a model


@dataclass(frozen=True)
class Planned:
    """To begin at this hour, for so many; None: for good."""

    begins: int
    lasts: int | None
    seconds: int


@dataclass(frozen=True)
class Act:
    """Half an hour after this hour: somebody saves another policy, or ends one of those planned."""

    hour: int
    ends: int | None


@dataclass
class Model:
    """What is active, by the hour, without regard to when somebody looks."""

    planned: list[Planned]
    saved: list[tuple[float, int]] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)

    def active(self, now: float) -> int:
        began = [(at, -1, seconds) for at, seconds in self.saved]
        began += [
            (one.begins, number, one.seconds)
            for number, one in enumerate(self.planned)
            if one.begins <= now and now < self._end(number, one)
        ]
        return max(began)[2]

    def _end(self, number: int, one: Planned) -> float:
        ends = float("inf") if one.lasts is None else one.begins + one.lasts
        return min(ends, self.ended.get(number, ends))


LAST: Final = 16
BEFORE: Final = 600
several = st.lists(
    st.builds(
        Planned,
        begins=st.integers(0, 8),
        lasts=st.none() | st.integers(1, 7),
        seconds=st.sampled_from([30, 60, BEFORE]),
    ),
    max_size=6,
)
acts = st.lists(st.builds(Act, hour=st.integers(0, 12), ends=st.none() | st.integers(0, 5)), max_size=3)
looks = st.dictionaries(st.integers(0, LAST - 1), st.sets(st.integers(0, 5), max_size=2))
EVERY_HOUR: Final[dict[int, set[int]]] = {hour: set() for hour in range(LAST)}


@pytest.mark.slow
@settings(max_examples=40)
@given(planned=several, acts=acts, looks=looks)
@example([Planned(0, 4, 60), Planned(1, 1, 30)], [], EVERY_HOUR)  # one within the other
@example([Planned(0, 2, 60), Planned(1, 2, 30)], [], EVERY_HOUR)  # overlapping
@example([Planned(1, 1, 30), Planned(0, 1, 60)], [], EVERY_HOUR)  # back to back
@example([Planned(1, None, 30), Planned(0, None, 60)], [], {2: set()})  # both while nobody was there
@example([Planned(0, 6, 60)], [Act(1, None)], {3: set()})  # saved before it was begun late
@example([Planned(0, 6, 60), Planned(1, 6, 60)], [Act(2, 0)], EVERY_HOUR)  # equal ones
@example([Planned(0, 4, 60), Planned(1, None, 60)], [], EVERY_HOUR)  # for good what is so for a while
@example([Planned(0, None, 60), Planned(1, 4, 30)], [], {0: {0}, 1: {0}, 2: set(), 6: set()})
@example([Planned(0, 4, 60), Planned(1, 1, 30)], [], {0: {0}, 1: {0}, 2: set(), 6: set()})
@example([Planned(0, 9, 60), Planned(1, None, 30)], [], {0: {0}, 1: {0}, 2: set(), 6: set()})
@example([Planned(0, 9, 60), Planned(1, None, 30)], [], {0: {0}, 1: {0}, 3: {0}, 4: set()})
def test_what_is_active_does_not_depend_on_when_somebody_looks(
    planned: list[Planned], acts: list[Act], looks: dict[int, set[int]]
) -> None:
    """`looks`: the hours in which what is due is begun and ended, and whose steps fail there."""
    moment = timezone.now()
    t0 = moment + HOUR

    def stamp(instance: PolicyVersion, **_: object) -> None:
        instance.made_at = moment

    pre_save.connect(stamp, sender=PolicyVersion)
    try:
        with transaction.atomic():
            people, model = make_people(), Model(planned)
            save(people, BEFORE)
            model.saved.append((-1.0, BEFORE))
            rows = [
                plan(
                    people,
                    t0 + one.begins * HOUR,
                    None if one.lasts is None else one.lasts * HOUR,
                    one.seconds,
                )
                for one in planned
            ]
            for hour in range(LAST + 1):
                moment = t0 + hour * HOUR
                if hour in looks or hour == LAST:
                    fails = [rows[number].pk for number in looks.get(hour, ()) if number < len(rows)]
                    with failing(*fails):
                        schedule.run_due(moment)
                    if not fails:
                        assert said(people.acme) == model.active(hour)
                moment += HOUR / 2
                for number, act in enumerate(acts):
                    if act.hour != hour:
                        continue
                    if act.ends is None:
                        save(people, 1000 + number)
                        model.saved.append((hour + 0.5 + number / 100, 1000 + number))
                        assert said(people.acme) == 1000 + number
                    elif act.ends < len(planned) and planned[act.ends].lasts is not None:
                        with suppress(Http404):
                            end(people, rows[act.ends])
                        model.ended.setdefault(act.ends, hour + 0.5)
            assert not schedule.open_of(people.acme).exists()
            transaction.set_rollback(True)
    finally:
        pre_save.disconnect(stamp, sender=PolicyVersion)


# One by one


def test_the_outer_one_is_active_again_until_it_ends(people: People) -> None:
    save(people, 600)
    before = services.active_policy(people.acme).document
    t0 = timezone.now() + HOUR
    plan(people, t0, 4 * HOUR, 60)
    plan(people, t0 + HOUR, HOUR, 30)
    active = []
    for hour in range(5):
        schedule.run_due(t0 + hour * HOUR)
        active.append(said(people.acme))
    assert active == [60, 30, 60, 60, 600]
    assert services.active_policy(people.acme).document == before
    restored = services.versions_of(people.acme).values_list("number", "same_as")
    assert list(restored) == [(5, 1), (4, 2), (3, None), (2, None), (1, None)]
    assert states() == ["done", "done"]


@pytest.mark.parametrize(("begins", "looks"), [(1, 1), (2, 3)], ids=["at the same moment", "late"])
def test_the_history_says_that_one_ended_before_the_next_began(
    begins: int, looks: int, people: People
) -> None:
    save(people, 600)
    t0 = timezone.now() + HOUR
    plan(people, t0 + begins * HOUR, 4 * HOUR, 30)
    plan(people, t0, HOUR, 60)
    schedule.run_due(t0)
    schedule.run_due(t0 + looks * HOUR)
    told = services.versions_of(people.acme).order_by("number").values_list("reason", flat=True)
    assert [reason.partition(" ")[0] for reason in told] == ["asked", "as", "end", "as"]
    assert (said(people.acme), states()) == (30, ["in force", "done"])


@pytest.mark.django_db(transaction=True)
def test_drivers_are_told_nothing_of_the_instant_between_two_that_touch(people: People) -> None:
    t0 = timezone.now() + HOUR
    plan(people, t0, HOUR, 60)
    plan(people, t0 + HOUR, HOUR, 30)
    schedule.run_due(t0)
    told: list[int | None] = []

    def push(_: object) -> None:
        told.append(said(people.acme))

    with mock.patch.object(control, "push_soon", push):
        schedule.run_due(t0 + HOUR)
    assert set(told) == {30}


def test_what_begins_for_good_replaces_what_began_before_it(people: People) -> None:
    t0 = timezone.now() + HOUR
    plan(people, t0, 9 * HOUR, 60)
    plan(people, t0 + HOUR, None, 90)
    plan(people, t0 + 2 * HOUR, HOUR, 30)
    active = []
    for hour in (0, 1, 2, 3, 9):
        schedule.run_due(t0 + hour * HOUR)
        active.append(said(people.acme))
    assert active == [60, 90, 30, 90, 90]
    assert states() == ["overtaken", "done", "done"]


def test_what_nobody_could_begin_in_time_does_not_replace_what_was_saved_since(people: People) -> None:
    now = timezone.now()
    rows = [plan(people, now + HOUR, lasts, 60) for lasts in (None, 9 * HOUR)]
    for row in rows:  # as if it were later now
        row.starts_at = now - HOUR
        row.save()
    save(people, 600)
    assert schedule.run_due(timezone.now()) == 2
    assert (said(people.acme), states()) == (600, ["overtaken", "overtaken"])


def test_the_outer_one_can_be_ended_within_the_inner_one(people: People) -> None:
    save(people, 600)
    t0 = timezone.now() + HOUR
    outer = plan(people, t0, 4 * HOUR, 60)
    plan(people, t0 + HOUR, HOUR, 30)
    schedule.run_due(t0 + HOUR)
    end(people, outer)
    assert (said(people.acme), states()) == (30, ["cancelled", "in force"])
    schedule.run_due(t0 + 2 * HOUR)
    assert (said(people.acme), states()) == (600, ["cancelled", "done"])


def test_those_that_the_release_before_has_begun_end_with_what_was_saved(people: People) -> None:
    """It noted the version that each had replaced, that of the outer one for the inner one."""
    save(people, 600)
    t0 = timezone.now() + HOUR
    plan(people, t0, 4 * HOUR, 60)
    inner = plan(people, t0 + HOUR, 9 * HOUR, 30)
    schedule.run_due(t0 + HOUR)
    ScheduledPolicy.objects.filter(pk=inner.pk).update(back_to=2)
    schedule.run_due(t0 + 4 * HOUR)
    assert said(people.acme) == 30
    schedule.run_due(t0 + 10 * HOUR)
    assert (said(people.acme), states()) == (600, ["done", "done"])


def test_one_that_the_release_before_left_to_be_overtaken_is(people: People) -> None:
    save(people, 600)
    t0 = timezone.now() + HOUR
    outer = plan(people, t0, 9 * HOUR, 60)
    schedule.run_due(t0)
    save(people, 300)
    plan(people, t0 + HOUR, HOUR, 30)
    schedule.run_due(t0 + HOUR)
    assert states() == ["overtaken", "in force"]
    ScheduledPolicy.objects.filter(pk=outer.pk).update(state=State.IN_FORCE)
    schedule.run_due(t0 + 2 * HOUR)
    assert (said(people.acme), states()) == (300, ["overtaken", "done"])


def test_the_page_says_which_one_is_active(people: People, browser_of: Callable[..., Client]) -> None:
    t0 = timezone.now() + HOUR
    plan(people, t0, 4 * HOUR, 60)
    plan(people, t0 + HOUR, HOUR, 30)
    schedule.run_due(t0 + HOUR)
    page = browser_of(people.viewer).get("/orgs/acme/policy/").content.decode()
    assert page.index("replaced by a later one") < page.rindex("active")
    assert page.count("replaced by a later one") == 1


# Limits


@pytest.mark.parametrize("how", ["by itself", "by hand"])
def test_it_ends_also_where_limits_refuse_what_was_there_before(
    how: str, people: People, api_of: Callable[[User], Client]
) -> None:
    save(people, 600)
    before = services.active_policy(people.acme).document
    t0 = timezone.now() + HOUR
    planned = plan(people, t0, 48 * HOUR, 60)
    schedule.run_due(t0)
    limit(people, 300)
    if how == "by itself":
        schedule.run_due(t0 + 48 * HOUR)
    else:
        path = f"/api/v1/orgs/acme/policy/scheduled/{planned.pk}"
        assert api_of(people.org_admin).delete(path).status_code == 204
    held = services.active_policy(people.acme)
    assert (held.document, held.number) == (before, 3)
    assert held.policy.ttl_last_use_seconds == 300  # what drivers are told of it
    assert states() == ["done" if how == "by itself" else "cancelled"]


def test_an_outer_one_is_active_again_within_new_limits(people: People) -> None:
    t0 = timezone.now() + HOUR
    plan(people, t0, 4 * HOUR, 600)
    plan(people, t0 + HOUR, HOUR, 30)
    schedule.run_due(t0 + HOUR)
    limit(people, 300)
    schedule.run_due(t0 + 2 * HOUR)
    assert (said(people.acme), services.active_policy(people.acme).policy.ttl_last_use_seconds) == (
        600,
        300,
    )
    schedule.run_due(t0 + 4 * HOUR)
    assert (services.active_policy(people.acme).own, states()) == (None, ["done", "done"])


def test_the_database_lets_back_only_what_a_temporary_policy_has_replaced(people: People) -> None:
    save(people, 900)
    save(people, 600)
    t0 = timezone.now() + HOUR
    plan(people, t0, 4 * HOUR, 60)
    schedule.run_due(t0)
    limit(people, 300)
    one, two, _ = services.versions_of(people.acme).order_by("number")
    for same_as, document in ((1, one.document), (2, one.document), (None, two.document)):
        with pytest.raises(IntegrityError, match="limits forbid"), transaction.atomic():
            _put_in_force(people.acme, document, same_as)
    _put_in_force(people.acme, two.document, 2)
    ScheduledPolicy.objects.update(state=State.DONE)
    with pytest.raises(IntegrityError, match="limits forbid"), transaction.atomic():
        _put_in_force(people.acme, two.document, 2, number=5)


def _put_in_force(org: Org, document: str, same_as: int | None, number: int = 4) -> None:
    version = PolicyVersion.objects.create(
        org=org, number=number, document=document, author_name="", reason="x", same_as=same_as
    )
    PolicyInForce.objects.filter(org=org).update(version=version)


# Failures


def test_an_org_whose_step_fails_holds_up_no_other(
    people: People, caplog: pytest.LogCaptureFixture
) -> None:
    t0 = timezone.now() + HOUR
    broken = plan(people, t0, 4 * HOUR, 60)
    plan(people, t0, 3 * HOUR, 30)
    plan(people, t0, HOUR, 45, "globex")
    ScheduledPolicy.objects.filter(pk=broken.pk).update(document='{"policy": {"tiers": "tape"}}')
    for _ in range(2):
        schedule.run_due(t0)
        assert (said(people.acme), said(people.globex)) == (30, 45)
    assert states() == ["waiting", "in force", "in force"]
    [first, _] = [one for one in caplog.records if one.name == schedule.__name__]
    assert first.levelno == logging.ERROR
    assert f"scheduled policy {broken.pk} failed" in first.getMessage()
    ScheduledPolicy.objects.filter(pk=broken.pk).update(document=documents.write(None))
    schedule.run_due(t0)
    assert said(people.acme) == 30, "what was created later is above it"
    schedule.run_due(t0 + 3 * HOUR)
    assert services.active_policy(people.acme).own is None


@pytest.mark.django_db(transaction=True)
def test_an_org_that_somebody_holds_is_left_to_the_next_call(people: People) -> None:
    t0 = timezone.now() + HOUR
    plan(people, t0, 4 * HOUR, 60)
    plan(people, t0 + HOUR, 4 * HOUR, 45, "globex")
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                orgs.for_change(people.principal("org_admin"), "acme")
                is_held.set()
                may_end.wait(60)
        finally:
            connection.close()

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        assert is_held.wait(30)
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '50ms'")
        assert schedule.run_due(t0 + HOUR) == 1
        assert states() == ["waiting", "in force"]
    finally:
        may_end.set()
        holding.join(60)
        with connection.cursor() as cursor:
            cursor.execute("RESET lock_timeout")
    assert schedule.run_due(t0 + HOUR) == 1
    assert (said(people.acme), said(people.globex)) == (60, 45)
