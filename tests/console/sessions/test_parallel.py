"""Jobs of one session that start and end beside each other, resizes, drains and lost nodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test import Client

from console.accounts.principal import SYSTEM
from console.fleet.models import Driver, Node
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.models import Operation
from console.placement.topology import Misconfigured, State
from console.sessions import desired, services
from console.sessions.budgets import Budgets
from console.sessions.changes import drains, jobs, sizes
from console.sessions.models import Job, JobBox, Session, Stream
from console.sessions.plans.proposals import CannotPlan
from tests.conftest import People
from tests.console.operations.runs import Killed, killed_at_query, run
from tests.console.sessions.fleets import GIB, make_driver, make_fleet
from tests.console.sessions.obeying import obeying
from tests.console.sessions.requests import create, resize, set_rules

REFUSED: Final = (CannotPlan, Misconfigured, operations.Busy, Impossible)
JOBS: Final = 4
TOLD: Final = ("job__driver", "job__session__org")
Browser = Callable[..., Client]


@pytest.fixture(autouse=True)
def _all_obey() -> Iterator[None]:
    with obeying():
        yield


def start(number: int, boxes: list[str] | None = None, wait_seconds: int = 0) -> Operation:
    with transaction.atomic():
        session = services.for_change(SYSTEM, "chat")
        driver = Driver.objects.get(name=f"job{number}")
        on = [f"cs{number}"] if boxes is None else boxes
        return jobs.start_job(
            SYSTEM, session, f"serve-{number}", driver, on, orgs="all", wait_seconds=wait_seconds
        )


def end(number: int) -> Operation:
    with transaction.atomic():
        return jobs.end_job(SYSTEM, services.for_change(SYSTEM, "chat"), f"serve-{number}")


def go_on() -> list[Operation]:
    """As the sweep does, for so long that nothing but waiting is left. What still runs."""
    for _ in range(20):
        for one in Operation.objects.filter(done=False).order_by("pk"):
            run(one)
    return list(Operation.objects.filter(done=False))


def finish() -> None:
    left = go_on()
    assert not left, [(one.sentence, one.state, one.message) for one in left]


def check_memory() -> None:
    """Nothing is promised twice: not by what documents say now, nor by what they will."""
    soon: Counter[int | None] = Counter()
    for stream in Stream.objects.all():
        slots = stream.slots if stream.next_slots is None else stream.next_slots
        soon[stream.next_node_id or stream.node_id] += slots * stream.slot_bytes
    budgets = Budgets()
    for node in Node.objects.all():
        told = [desired._spec(one, node, budgets) for one in desired._on(node).select_related(*TOLD)]
        assert sum(one["slots"] * one["slot_bytes"] for one in told) <= node.memory_bytes, node.name
        assert soon[node.pk] <= node.memory_bytes, node.name


def check_ended() -> None:
    assert not Operation.objects.filter(done=False).exists()
    assert not Stream.objects.exclude(operation=None).exists()
    session = Session.objects.get()
    assert session.cause == ""
    assert not session.boxes.filter(Q(leaving=True) | Q(ready=False)).exists()
    for job in Job.objects.all():
        assert job.running
        assert job.streams.count() == 4
        assert all(stream.slots for stream in job.streams.all())
    assert JobBox.objects.count() == Job.objects.count()
    check_memory()


@pytest.mark.django_db
def test_jobs_on_boxes_of_their_own_start_and_end_beside_each_other(people: People) -> None:
    make_fleet()
    run(create(people, boxes=4))
    for number in (1, 2, 3):
        make_driver(f"job{number}")
    started = [start(number) for number in (1, 2, 3)]
    assert len({one.target for one in started}) == 3
    sizes_of = {stream.pk: stream.next_slots for stream in Stream.objects.all()}
    check_memory()
    finish()
    assert {run(one).state for one in started} == {"succeeded"}
    assert {stream.pk: stream.slots for stream in Stream.objects.all()} == sizes_of
    kept = {stream.pk: stream.slots for stream in Stream.objects.filter(job__name="serve-3")}
    ended = [end(1), end(2)]
    finish()
    assert {run(one).state for one in ended} == {"succeeded"}
    assert {stream.pk: stream.slots for stream in Stream.objects.all()} == kept
    check_ended()


@pytest.mark.django_db
def test_a_second_operation_on_a_job_and_a_delete_beside_it_are_refused(people: People) -> None:
    make_fleet()
    run(create(people, boxes=2))
    make_driver("job1")
    starting = start(1)
    begins: list[Callable[[], Operation]] = [lambda: end(1), lambda: deleted(end_jobs=True)]
    for begin in begins:
        with pytest.raises(operations.Busy) as busy:
            begin()
        assert busy.value.operation == starting
    finish()
    deleting = deleted(end_jobs=True)
    make_driver("job2")
    with pytest.raises(operations.Busy) as busy:
        start(2)
    assert busy.value.operation == deleting


def deleted(*, end_jobs: bool) -> Operation:
    with transaction.atomic():
        return sizes.delete(SYSTEM, services.for_change(SYSTEM, "chat"), end_jobs=end_jobs)


@pytest.mark.django_db
def test_a_job_that_would_change_what_another_one_makes_waits_for_it(people: People) -> None:
    """Both on the same box: the second one takes half of the memory of the first."""
    make_fleet()
    run(create(people, boxes=1))
    for number in (1, 2):
        make_driver(f"job{number}")
    first = start(1, ["cs1"])
    with pytest.raises(CannotPlan, match=f"“{first.sentence}” is moving"):
        start(2, ["cs1"])
    second = run(start(2, ["cs1"], wait_seconds=60))
    assert Session.objects.get().cause == "WaitingForDrain"
    assert second.awaits == ["session:chat"]
    finish()
    assert run(second).state == "succeeded"
    ours, theirs = (Stream.objects.filter(job__name=f"serve-{number}", index=0) for number in (1, 2))
    assert ours.get().slots == theirs.get().slots
    assert Session.objects.get().cause == ""


@pytest.mark.django_db
def test_a_session_waits_as_long_as_one_of_its_operations_does(people: People) -> None:
    make_fleet()
    run(create(people, boxes=2))
    for number in (1, 2):
        make_driver(f"job{number}")
    Node.objects.update(state="cordoned")
    first, second = (run(start(number, wait_seconds=3600)) for number in (1, 2))
    operations.cancel(SYSTEM, first.pk)
    run(first)
    assert Session.objects.get().cause == "NodeCordoned"
    operations.cancel(SYSTEM, second.pk)
    run(second)
    assert Session.objects.get().cause == ""


@pytest.mark.django_db
def test_a_start_that_goes_back_leaves_to_others_what_they_were_promised(people: People) -> None:
    make_fleet(boxes=1)
    set_rules(people, grant_percent=70)
    run(create(people, boxes=1))
    for number in (1, 2, 3):
        make_driver(f"job{number}")
    run(start(1, []))
    finish()
    before = Stream.objects.get(job__name="serve-1", index=0).slots
    second = start(2, [])  # and the first has half
    while Stream.objects.exclude(operation=None).exists():
        operations.advance(second.pk)
    third = start(3, [])  # and all have a third
    operations.cancel(SYSTEM, second.pk)
    finish()
    assert (run(second).state, run(third).state) == ("cancelled", "succeeded")
    check_ended()
    assert Stream.objects.get(job__name="serve-1", index=0).slots < before


@pytest.mark.django_db
def test_what_was_reserved_with_the_request_is_given_back_before_any_step(people: People) -> None:
    """The second job takes memory of the first one, which has not been told so yet."""
    make_fleet(boxes=2, memory_bytes=GIB // 4)
    run(create(people, boxes=1))
    for number in (1, 2):
        make_driver(f"job{number}")
    run(start(1, ["cs1"]))
    finish()
    before = list(Stream.objects.order_by("pk").values())
    asked = start(2, ["cs1"])
    assert Stream.objects.filter(operation=asked, job__name="serve-1").exists()
    operations.cancel(SYSTEM, asked.pk)
    finish()
    assert run(asked).state == "cancelled"
    assert list(Stream.objects.order_by("pk").values()) == before
    check_ended()


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_at_once_all_end_at_their_goal_or_back(people: People, seed: int) -> None:
    """Workers are killed at any query; nodes are drained, lost and come back."""
    chosen = random.Random(seed)
    make_fleet(boxes=JOBS + 2, memory_bytes=GIB // 4)
    run(create(people, boxes=JOBS))
    for number in range(1, JOBS + 1):
        make_driver(f"job{number}")

    def begin() -> None:
        number = chosen.randint(1, JOBS)
        boxes = chosen.choice([[], [f"cs{number}"], [f"cs{number}"]])
        wait = chosen.choice([0, 3600])
        acts: list[Callable[[], object]] = [
            lambda: start(number, boxes, wait_seconds=wait),
            lambda: start(number, boxes, wait_seconds=wait),
            lambda: end(number),
            lambda: resize(people, chosen.randint(JOBS, JOBS + 2), wait_seconds=wait),
            lambda: drains.drain(SYSTEM, f"ax{chosen.randint(1, 4)}"),
            lambda: lose(f"ax{chosen.randint(1, 4)}"),
            back,
            cancel,
        ]
        try:
            with transaction.atomic():
                chosen.choice(acts)()
        except (*REFUSED, operations.CannotRetry):
            pass
        except Exception as error:
            if type(error).__name__ not in ("Http404", "ValidationError"):
                raise

    def cancel() -> None:
        if running := list(Operation.objects.filter(done=False).order_by("pk")):
            operations.cancel(SYSTEM, chosen.choice(running).pk)

    def advance() -> None:
        for one in list(Operation.objects.filter(done=False).order_by("pk")):
            if chosen.random() < 0.6:
                try:
                    with killed_at_query(chosen.randint(1, 120)):
                        operations.advance(one.pk)
                except Killed:
                    connection.close()

    for _ in range(40):
        begin()
        check_memory()
        advance()
        check_memory()
    back()
    Node.objects.update(state="ready")
    go_on()
    for one in Operation.objects.filter(done=False):  # they wait for memory that there is not
        operations.cancel(SYSTEM, one.pk)
    finish()
    check_ended()


def lose(name: str) -> None:
    Node.objects.filter(name=name).exclude(state=State.LOST.value).update(
        state=State.LOST.value, held_state=State.READY.value
    )


def back() -> None:
    Node.objects.filter(state=State.LOST.value).update(state=State.READY.value, held_state="")


@pytest.mark.django_db
def test_starts_that_are_asked_for_with_one_etag_all_begin(
    people: People, api_of: Browser, browser_of: Browser
) -> None:
    make_fleet()
    run(create(people, boxes=3))
    admin = api_of(people.platform_admin)
    seen = admin.get("/api/v1/sessions/chat").headers["ETag"]
    for number in (1, 2, 3):
        make_driver(f"job{number}")
        told = {"name": f"serve-{number}", "driver": f"job{number}", "boxes": [f"cs{number}"]}
        answer = admin.post(
            "/api/v1/sessions/chat/jobs",
            told,
            content_type="application/json",
            headers={"If-Match": seen, "Idempotency-Key": str(number)},
        )
        assert answer.status_code == 202, answer.content
    shown = admin.get("/api/v1/sessions/chat").json()
    assert (shown["operation"], len(shown["part_operations"])) == (None, 3)
    page = browser_of(people.platform_admin).get("/sessions/chat/").content.decode()
    assert all(f"Start job serve-{number} in session chat" in page for number in (1, 2, 3))
