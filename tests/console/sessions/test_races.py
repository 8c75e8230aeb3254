"""What may happen at once, made to: each of these orders has once gone wrong, or could have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.accounts.roles import Role
from console.control.models import Target
from console.fleet import nodes
from console.fleet import services as fleet
from console.fleet.membership import joins, tokens
from console.fleet.models import Driver, Node
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs import services as orgs
from console.placement.topology import State
from console.policies.evidence import purges
from console.sessions import services
from console.sessions.changes import drains, driver_removal, jobs, moves
from console.sessions.models import Phase, Session, Stream
from console.sessions.steps import machines, relocation
from console.sessions.steps.observations import Observations
from telemetry import events
from tests.conftest import People
from tests.console.fleet.worlds import DRIVER_FACTS, FACTS
from tests.console.operations.runs import run
from tests.console.sessions.fleets import arrive, make_across, make_driver, make_fleet, make_node
from tests.console.sessions.requests import create, resize, set_rules
from tests.live import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


class Beside(threading.Thread):
    """Something that goes on beside the test, in a connection of its own."""

    def __init__(self, do: Callable[[], Any]) -> None:
        super().__init__()
        self._do = do
        self.outcome: Any = None
        self._backend = threading.Event()
        self.start()
        self._backend.wait(30)

    def run(self) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                self._number = cursor.fetchone()[0]
            self._backend.set()
            self.outcome = self._do()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
            self.outcome = error
        finally:
            connection.close()

    def waits_or_has_ended(self) -> bool:
        """Whether it can't go on before somebody else does, or need not go on at all."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [self._number])
            return bool(cursor.fetchone()[0]) or not self.is_alive()

    def result(self) -> Any:
        """What came of it. Raises what it raised."""
        self.join(60)
        assert not self.is_alive()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@contextmanager
def held_until(beside: Callable[[], Any]) -> Iterator[Beside]:
    """The fleet is held while something else begins, and until that waits, or has ended without."""
    with transaction.atomic():
        fleet.lock_fleet()
        other = Beside(beside)
        wait_until("it waits", other.waits_or_has_ended, 30)
        yield other


def begun_job(people: People) -> Operation:
    """A job of the session `chat`, whose shards are to be made."""
    admin = people.principal("platform_admin")
    driver = make_driver("job7")
    with transaction.atomic():
        return jobs.start_job(admin, services.for_change(admin, "chat"), "serve", driver)


def in_session(name: str = "chat") -> Session:
    with transaction.atomic():
        return services.for_change(SYSTEM, name)


def test_a_node_that_is_drained_has_nothing_even_of_what_was_planned_before(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fleet()
    run(create(people, boxes=1))
    drained = drains.drain(people.principal("platform_on_call"), "ax1")
    take_job, beside = machines.take_job, []

    def planned_before(*given: Any) -> None:
        """The plan is made, and nothing is reserved yet, when the drain goes on as far as it can."""
        beside.append(Beside(lambda: run(drained)))
        wait_until("the drain waits, or is done", beside[0].waits_or_has_ended, 30)
        take_job(*given)

    monkeypatch.setattr(machines, "take_job", planned_before)
    begun_job(people)
    ended = beside[0].result()
    assert not (ended.done and Stream.objects.filter(node__name="ax1").exists())
    assert Stream.objects.filter(node__name="ax1", operation__isnull=False).exists()


def test_a_session_that_is_placed_and_one_that_is_changed_do_not_wait_for_each_other(
    people: People,
) -> None:
    make_fleet()
    run(create(people, "first", boxes=3))
    waiting = run(create(people, boxes=2, wait_seconds=3600))
    with held_until(lambda: operations.advance(waiting.pk)) as placing:
        services.for_change(SYSTEM, "chat")
    placing.result()
    waiting.refresh_from_db()
    assert (waiting.state, waiting.attempts) == ("running", 0)


def test_shards_that_go_back_and_a_change_of_their_session_do_not_wait_for_each_other(
    people: People,
) -> None:
    make_fleet()
    run(create(people, boxes=1))
    started = begun_job(people)
    arrive(started)
    Operation.objects.filter(pk=started.pk).delete()
    resized = resize(people, 2)
    run(resized)
    first = relocation.of_operation(resized)[0]
    assert first.next_node is not None
    relocation._finish(first, first.next_node, relocation._Changes())
    operations.cancel(SYSTEM, resized.pk)
    with held_until(lambda: operations.advance(resized.pk)) as going_back:
        Stream.objects.update(why="planned anew")
    going_back.result()
    resized.refresh_from_db()
    assert (resized.state, resized.attempts) == ("undoing", 0)


def test_a_session_that_waits_for_a_change_of_the_rules_is_made_by_the_new_ones(people: People) -> None:
    make_fleet()
    set_rules(people, boxes_min=2, boxes_increment=2)
    with held_until(lambda: create(people, boxes=3)) as creating:
        set_rules(people, boxes_min=1, boxes_increment=1)
    assert run(creating.result()).state == "succeeded"
    session = Session.objects.get()
    assert (session.boxes_desired, session.boxes_min, session.boxes_increment) == (3, 1, 1)


def test_maintenance_and_a_way_back_do_not_both_win(people: People) -> None:
    make_across(people.acme)
    make_node("ax5", "l1")
    with transaction.atomic():
        session = services.for_change(SYSTEM, "chat")
        [stream] = services.streams_of(session).filter(node__name="ax4")
        moving = moves.move(SYSTEM, session, stream, Node.objects.get(name="ax5"))
    arrive(moving)
    operations.cancel(SYSTEM, moving.pk)
    with held_until(lambda: operations.advance(moving.pk)) as going_back:
        nodes.set_state(SYSTEM, Node.objects.get(name="ax4"), State.MAINTENANCE)
    going_back.result()
    assert run(moving).state == "cancelled", moving.message
    assert not Stream.objects.filter(node__name="ax4").exists()


def test_maintenance_and_a_placement_do_not_both_win(people: People) -> None:
    make_fleet()
    run(create(people, boxes=1))
    admin = people.principal("platform_admin")

    def rest() -> None:
        with transaction.atomic():
            node = fleet.for_change(admin, fleet.visible_nodes, "ax1", Role.ON_CALL)
            nodes.set_state(admin, node, State.MAINTENANCE)

    with held_until(rest) as resting:
        begun_job(people)
    with pytest.raises(Impossible):
        resting.result()
    assert Node.objects.get(name="ax1").state == "ready"


def test_of_a_resize_and_a_drain_at_once_both_are_done(people: People) -> None:
    make_fleet()
    run(create(people, boxes=1))
    started = begun_job(people)
    arrive(started)
    Operation.objects.filter(pk=started.pk).delete()
    barrier = threading.Barrier(2)
    on_call = people.principal("platform_on_call")

    def drain() -> Operation:
        barrier.wait(30)
        return run(drains.drain(on_call, "ax1"))

    def grow() -> Operation:
        barrier.wait(30)
        return run(resize(people, 2, wait_seconds=3600))  # where the drain was first, it waits for it

    both = [Beside(drain), Beside(grow)]
    drained, grown = (one.result() for one in both)
    for _ in range(6):
        arrive(drained)
        arrive(grown)
        drained, grown = run(drained), run(grown)
    assert (drained.state, grown.state) == ("succeeded", "succeeded")
    assert not Stream.objects.filter(node__name="ax1").exists()
    assert not Stream.objects.exclude(operation=None).exists()


def test_a_driver_is_removed_between_steps_of_a_move_and_not_in_one(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_across(people.acme)
    admin = people.principal("platform_admin")
    with transaction.atomic():
        moved = moves.restore_rails(admin, services.for_change(admin, "chat"))
    Stream.objects.filter(operation=moved).update(phase=Phase.MOVING)
    Driver.objects.update(lost_at=timezone.now())
    facts, beside = relocation._facts, list[Beside]()

    def removed_meanwhile(shards: Sequence[Stream]) -> Observations:
        """The step has read its shards, and writes them down when the removal waits, or has ended."""
        if not beside:
            beside.append(Beside(lambda: driver_removal.remove(admin, "job7")))
            wait_until("the removal waits, or is done", beside[0].waits_or_has_ended, 30)
        return facts(shards)

    monkeypatch.setattr(relocation, "_facts", removed_meanwhile)
    assert run(moved).state == "succeeded", "it was there already"
    removed = beside[0].result()
    assert not Stream.objects.exists()
    assert removed.target in ("session:chat#job/serve", "driver:job7")


def test_an_operation_that_goes_on_by_itself_meanwhile_does_not_keep_a_driver_from_being_removed(
    people: People,
) -> None:
    make_across(people.acme)
    Target.objects.create(kind="driver", name="job7", generation=1)
    admin = people.principal("platform_admin")
    with transaction.atomic():
        purging = purges.purge(admin, orgs.for_change(admin, "acme"), reason="ended")
    Operation.objects.filter(pk=run(purging).pk).update(state="stuck")
    with transaction.atomic():
        operations.retry(admin, purging.pk)
        removing = Beside(lambda: driver_removal.remove(admin, "job7"))
        wait_until("it waits", removing.waits_or_has_ended, 30)
    removing.result()
    assert not Driver.objects.exists()
    assert run(purging).state == "succeeded"


@pytest.mark.parametrize("name", ["job7", "ax1"])
def test_a_heartbeat_with_news_and_a_job_that_begins_there_do_not_wait_for_each_other(
    people: People, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_fleet(boxes=1)
    run(create(people, boxes=1))
    driver = make_driver("job7", heartbeat_sha256=tokens.digest("ours"))
    Node.objects.update(heartbeat_sha256=tokens.digest("ours"))
    admin = people.principal("platform_admin")
    beside = list[Beside]()

    def job() -> Operation:
        with transaction.atomic():
            return jobs.start_job(
                admin, services.for_change(admin, "chat"), "serve", driver, wait_seconds=60
            )

    def begins_meanwhile(*given: Any) -> Any:
        """The heartbeat has written the row, and notes the event when the job waits, or is planned."""
        beside.append(Beside(job))
        wait_until("the job waits, or is done", beside[0].waits_or_has_ended, 30)
        return events.note(*given)

    monkeypatch.setattr(joins, "note", begins_meanwhile)
    if name == "job7":
        assert joins.beats(name, "ours", replace(DRIVER_FACTS, software_version="0.2.0"))
    else:
        assert joins.beats(name, "ours", replace(FACTS, software_version="0.2.0"))
    assert beside[0].result().kind == "session.start-job"
