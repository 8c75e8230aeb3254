"""The promises of sessions, each under whatever happens in whatever order, and by many at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from console.accounts.principal import SYSTEM
from console.fleet.models import Box, Node
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs.models import Org
from console.placement.rules import Cause, Rules
from console.placement.topology import Tier
from console.sessions import rules, services
from console.sessions.changes import drains, moves, sizes
from console.sessions.models import RuleSet, Session, SessionBox, Stream
from console.sessions.plans import reservations
from console.sessions.plans.proposals import CannotPlan, refusals
from console.sessions.plans.snapshot import Snapshot
from telemetry.models import Event
from tests.conftest import People
from tests.console.operations.runs import Killed, killed_at_query, run
from tests.console.sessions.fleets import arrive, make_driver, make_fleet, make_node, run_job
from tests.console.sessions.requests import boxes_of, create, resize, set_rules

NAMES = st.sampled_from(["s1", "s2", "s3"])
BOXES = st.integers(1, 7)
REFUSED = (CannotPlan, operations.Busy, Impossible)


class Sessions(RuleBasedStateMachine):
    """People ask for whatever they like; operations are advanced, cancelled, and left lying."""

    def __init__(self) -> None:
        super().__init__()
        for model in (Operation, Session, RuleSet, Org):
            model.objects.all().delete()
        self.org = Org.objects.create(slug="acme", name="Acme")
        if not Box.objects.exists():  # nobody changes the fleet
            make_fleet(boxes=6)

    def attempt(self, do: Callable[[], object]) -> None:
        try:
            with transaction.atomic():
                do()
        except REFUSED:
            pass

    @rule(name=NAMES, boxes=BOXES, wait=st.sampled_from([0, 3600]))
    def create(self, name: str, boxes: int, wait: int) -> None:
        if not Session.objects.filter(name=name).exists():
            self.attempt(
                lambda: sizes.create(SYSTEM, sizes.new_session(name, self.org, boxes), wait_seconds=wait)
            )

    @rule(name=NAMES, boxes=BOXES, wait=st.sampled_from([0, 3600]))
    def resize(self, name: str, boxes: int, wait: int) -> None:
        if Session.objects.filter(name=name).exists():
            self.attempt(
                lambda: sizes.resize(SYSTEM, services.for_change(SYSTEM, name), boxes, wait_seconds=wait)
            )

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if Session.objects.filter(name=name).exists():
            self.attempt(lambda: sizes.delete(SYSTEM, services.for_change(SYSTEM, name)))

    @rule(low=st.integers(1, 4), by=st.integers(1, 3), high=st.none() | st.integers(1, 7))
    def set_rules(self, low: int, by: int, high: int | None) -> None:
        cluster = {"boxes_min": low, "boxes_increment": by, "boxes_max": high}
        if high is None or high >= low:
            self.attempt(lambda: rules.set_rules(SYSTEM, rules.for_change(SYSTEM, None), cluster))

    @initialize(quota=st.integers(0, 8))
    def begin_with_a_quota(self, quota: int) -> None:
        self.set_quota(quota)

    @rule(quota=st.integers(0, 8))
    def set_quota(self, quota: int) -> None:
        self.attempt(
            lambda: rules.set_rules(SYSTEM, rules.for_change(SYSTEM, self.org), {"boxes_quota": quota})
        )

    @rule(steps=st.integers(1, 3))
    def advance(self, steps: int) -> None:
        for operation in Operation.objects.filter(done=False).order_by("id"):
            for _ in range(steps):
                operations.advance(operation.pk)

    @rule()
    def cancel(self) -> None:
        for operation in Operation.objects.filter(done=False)[:1]:
            operations.cancel(SYSTEM, operation.pk)

    @invariant()
    def no_session_is_below_its_minimum_or_off_its_increment(self) -> None:
        held: Rules = rules.effective_rules(self.org)
        for session in Session.objects.all():
            assert list(held.refusals(session.boxes_desired)) == []
            assert session.boxes_desired % session.boxes_increment == 0

    @invariant()
    def the_quota_holds_at_the_largest_of_the_three_sizes(self) -> None:
        quota = rules.of_an_org(self.org).boxes_quota
        held = rules.held_by(self.org)
        assert quota is None or held <= quota, f"{held} boxes with a quota of {quota}"

    @invariant()
    def whatever_has_ended_is_whole(self) -> None:
        for session in Session.objects.all():
            if operations.running_on(f"session:{session.name}") is None:
                size = services.sizes(session)
                assert size.desired == size.granted == size.actual
                assert not session.boxes.filter(leaving=True).exists()
                assert session.cause == ""


def without_quotas(world: Snapshot, session: Session, boxes: int) -> None:
    """`reservations.check_size` by somebody who forgot the quota."""
    for refused in refusals(rules.effective_rules(session.org, session.path), boxes, world.fleet):
        raise CannotPlan(refused.cause, refused.sentence)


@pytest.mark.slow
class TestSessions(TestCase):
    ANYTHING = settings(
        max_examples=30,
        stateful_step_count=25,
        suppress_health_check=list(HealthCheck),
    )

    def test_promise_6_no_session_below_its_minimum_or_off_its_increment(self) -> None:
        run_state_machine_as_test(Sessions, settings=self.ANYTHING)

    def test_the_machine_notices_a_quota_that_nobody_looks_at(self) -> None:
        """Always with the same examples, and the first that fails will do."""
        once = settings(
            self.ANYTHING,
            max_examples=100,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        )
        disabled = mock.patch.object(reservations, "check_size", without_quotas)
        with disabled, pytest.raises(AssertionError, match="quota"):
            run_state_machine_as_test(Sessions, settings=once)


def at_once(*calls: Callable[[], object]) -> list[object]:
    """Each in a thread and a connection of its own, from the same moment on; what came of each."""
    barrier = threading.Barrier(len(calls))
    outcomes: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        try:
            barrier.wait(30)
            outcomes[number] = calls[number]()
        except REFUSED as error:
            outcomes[number] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


@pytest.mark.django_db(transaction=True)
def test_promise_6_of_two_resizes_at_once_one_is_done(people: People) -> None:
    make_fleet()
    run(create(people, boxes=1))
    outcomes = at_once(lambda: resize(people, 2), lambda: resize(people, 3))
    [begun] = [one for one in outcomes if isinstance(one, Operation)]
    [busy] = [one for one in outcomes if isinstance(one, operations.Busy)]
    assert busy.operation.pk == begun.pk
    assert run(begun).done
    assert Session.objects.get().boxes_desired == len(boxes_of()) == begun.plan["boxes"]


@pytest.mark.django_db(transaction=True)
def test_promise_6_at_the_edge_of_a_quota_one_of_many_gets_the_last_boxes(people: People) -> None:
    make_fleet(boxes=8)
    set_rules(people, people.acme, boxes_quota=4)
    outcomes = at_once(*(lambda name=name: create(people, name, boxes=3) for name in ("a", "b", "c")))
    assert len([one for one in outcomes if isinstance(one, Operation)]) == 1
    assert all(one.cause.value == "ExceedsOrgQuota" for one in outcomes if isinstance(one, CannotPlan))
    assert rules.held_by(people.acme) == 3


@pytest.mark.django_db(transaction=True)
def test_promise_6_rules_that_get_stricter_and_a_session_that_breaks_them_do_not_both_win(
    people: People,
) -> None:
    make_fleet()
    at_once(lambda: create(people, boxes=3), lambda: set_rules(people, boxes_increment=2))
    sizes = list(Session.objects.values_list("boxes_desired", flat=True))
    assert (sizes, rules.effective_rules(None).boxes_increment) in (([3], 1), ([], 2))


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_promise_8_a_resize_that_is_killed_at_any_query_is_done_once(people: People) -> None:
    make_fleet()
    run(create(people, boxes=1))
    number, finished, boxes = 0, False, 1
    while not finished:
        number += 1
        boxes = 5 - boxes  # 4, 1, 4, …
        operation = resize(people, boxes)
        try:
            with killed_at_query(number):
                run(operation)
            finished = True
        except Killed:
            connection.close()
        assert run(operation).state == "succeeded", number
        assert len(boxes_of()) == boxes, number
        assert SessionBox.objects.filter(ready=False).count() == 0, number
    assert number > 20


@pytest.mark.django_db
def test_a_stream_may_come_nearer_even_if_not_as_near_as_the_rules_want(people: People) -> None:
    make_fleet()
    make_node("far", "l9", memory_bytes=8 << 30)
    Node.objects.exclude(name="far").update(state="cordoned")
    admin = people.principal("platform_admin")
    run(create(people, boxes=1))
    run_job(people, make_driver("job7"))
    Node.objects.update(state="ready")
    set_rules(people, path="require_rail")

    def move(to: str) -> Operation:
        session = services.for_change(admin, "chat")
        shard = Stream.objects.get(box__name="cs1", domain=1)
        return moves.move(admin, session, shard, Node.objects.get(name=to))

    with transaction.atomic():
        nearer = move("ax1")  # on the leaf of another domain
    arrive(nearer)
    assert run(nearer).state == "succeeded"
    with transaction.atomic(), pytest.raises(CannotPlan, match="the rules refuse it"):
        move("ax3")  # no nearer than that
    with transaction.atomic():
        arrive(move("ax2"))
    assert Stream.objects.get(domain=1).tier == Tier.RAIL


@pytest.mark.django_db
def test_a_stream_that_is_on_its_way_is_not_brought_back_too(people: People) -> None:
    make_fleet()
    make_node("far", "l9", memory_bytes=8 << 30)
    admin = people.principal("platform_admin")
    run(create(people, boxes=1))
    run_job(people, make_driver("job7"))
    Node.objects.filter(name__in=["ax2", "ax3", "ax4"]).update(state="cordoned")
    drained = drains.drain(admin, "ax1")
    for _ in range(2):
        operations.advance(drained.pk)
    assert Stream.objects.get(next_node__name="far").next_tier == Tier.SPINE
    Node.objects.filter(state="cordoned").update(
        state="ready", memory_bytes=8 << 30
    )  # it could be nearer
    with transaction.atomic():
        session = services.for_change(admin, "chat")
        assert moves.plan_rails(session).moves == ()
        why = "1 stream is being moved or resized: wait until that is done. All others are on rails."
        with pytest.raises(CannotPlan, match=why) as refused:
            moves.restore_rails(admin, session)
        assert refused.value.cause is Cause.WAITING_FOR_DRAIN, "it may need it then"
        assert moves.sentence_of(session, moves.plan_rails(session)) == why


@pytest.mark.django_db
def test_promise_7_no_spine_placement_where_rules_forbid_it_and_one_warning_where_they_do_not(
    people: People,
) -> None:
    make_fleet()
    make_node("far", "l9", memory_bytes=8 << 30)
    admin = people.principal("platform_admin")
    run(create(people, boxes=1))
    driver = make_driver("job7")
    run_job(people, driver)
    assert {Tier(shard.tier) for shard in Stream.objects.all()} == {Tier.RAIL}
    Node.objects.filter(name__in=["ax2", "ax3", "ax4"]).update(state="cordoned")

    set_rules(people, refuse_spine=True)
    drained = drains.drain(admin, "ax1")
    for _ in range(3):
        operations.advance(drained.pk)
    drained.refresh_from_db()
    assert "which the rules refuse" in drained.message
    assert not Stream.objects.filter(next_node__name="far").exists()
    on_ax1 = Stream.objects.get(node__name="ax1")
    with transaction.atomic():
        locked = services.for_change(admin, "chat")
    with pytest.raises(CannotPlan) as refused:
        moves.move(admin, locked, on_ax1, Node.objects.get(name="far"))
    assert refused.value.cause.value == "SpineRefusedByRule"

    set_rules(people, refuse_spine=False)
    for _ in range(2):
        operations.advance(drained.pk)
    arrive(drained)
    for _ in range(2):
        operations.advance(drained.pk)
    assert Stream.objects.get(pk=on_ax1.pk).tier == Tier.SPINE
    [event] = Event.objects.filter(kind="session.spine")
    assert event.data["stream"] == on_ax1.name
    assert set(event.topics) == {"session:chat", "node:far", "fleet"}
