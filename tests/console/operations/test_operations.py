"""Operations as people and automation see them, over a real database, killed wherever possible."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connection, transaction
from django.test import Client
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.environment import PROJECT
from console.fleet.services import lock_fleet
from console.operations import core, services
from console.operations.core import Done, Outcome, State
from console.operations.machines import Step
from console.operations.models import Operation, new_id
from console.shell.tasks import forget_what_is_over
from telemetry.models import Event
from tests.conftest import People
from tests.console.operations import machines
from tests.console.operations.machines import effects
from tests.console.operations.runs import Killed, killed_at_query, run
from tests.html import compact
from tests.live import wait_until


def start(kind: str = "tests.steps", target: str = "session:chat", **more: Any) -> Operation:
    with transaction.atomic():
        return services.start(SYSTEM, kind, target, f"Do {kind}", plan=more.pop("plan", {}), **more)


@pytest.mark.django_db
def test_it_does_its_steps_in_order_and_says_what_came_of_it() -> None:
    operation = run(start())
    assert operation.state == State.SUCCEEDED
    assert effects() == ["a", "b", "c"]
    assert operation.response == {"did": ["a", "b", "c"]}
    assert (operation.percent, operation.done, operation.error) == (100, True, None)
    event = Event.objects.get(kind="operation.succeeded")
    assert set(event.topics) == {"session:chat", "operations", "fleet"}


@pytest.mark.django_db
def test_what_fails_goes_back_to_where_it_was_and_says_why() -> None:
    operation = run(start("tests.fails"))
    assert operation.state == State.FAILED
    assert effects() == ["a", "not b", "not a"]
    assert operation.error == {"reason": "NoRoom", "detail": "There is no room."}
    assert operation.response is None


@pytest.mark.django_db
def test_what_fails_on_the_way_back_holds_its_target_until_a_person_tries_again(people: People) -> None:
    operation = run(start("tests.no-way-back"))
    assert (operation.state, operation.done) == (State.STUCK, False)
    assert operation.message == "There is no room."
    with pytest.raises(services.Busy, match="is stuck"), transaction.atomic():
        services.start(SYSTEM, "tests.steps", "session:chat", "Another", plan={})
    again = run(services.retry(people.principal("platform_on_call"), operation.pk, "there is now"))
    assert again.state == State.STUCK  # since there still is none
    assert Event.objects.filter(kind="operation.retry").exists()


@pytest.mark.django_db
def test_what_is_stuck_is_not_cancelled(
    people: People, api_of: Callable[..., Client], browser_of: Callable[..., Client]
) -> None:
    operation = run(start("tests.no-way-back"))
    answer = api_of(people.platform_admin).delete(f"/api/v1/operations/{operation.pk}")
    assert (answer.status_code, answer.json()["detail"]) == (409, "It is stuck: retry it.")
    page = browser_of(people.platform_admin).post(f"/operations/{operation.pk}/cancel/", follow=True)
    assert "It is stuck: retry it." in page.content.decode()
    operation.refresh_from_db()
    assert not operation.cancel_requested
    assert not Event.objects.filter(kind="operation.cancel").exists()


@pytest.mark.django_db
def test_a_worker_of_another_version_wears_out_nothing_that_it_does_not_know() -> None:
    operation = run(start("tests.waits"))
    Operation.objects.filter(pk=operation.pk).update(kind="future.kind")
    for _ in range(core.ATTEMPTS_MAX + 1):
        assert not services.advance(operation.pk)
    operation.refresh_from_db()
    assert (operation.state, operation.attempts) == (State.RUNNING, 0)
    assert services.take_due(timezone.now()) == []
    assert services.take_due(timezone.now() + services.UNKNOWN_FOR) == [operation.pk]
    Operation.objects.filter(pk=operation.pk).update(kind="tests.waits", plan={"go on": True})
    assert run(operation).state == State.SUCCEEDED


@pytest.mark.django_db
def test_cancelling_goes_back_and_doing_so_again_changes_nothing(people: People) -> None:
    operation = run(start("tests.waits"))
    assert (operation.message, operation.percent) == ("It waits.", 37)
    admin = people.principal("platform_admin")
    services.cancel(admin, operation.pk)
    services.cancel(admin, operation.pk)
    assert run(operation).state == State.CANCELLED
    assert effects() == ["a", "not a"]
    assert services.cancel(admin, operation.pk).state == State.CANCELLED
    told = Event.objects.get(kind="operation.cancel")
    assert told.sentence == "“Do tests.waits” is being cancelled."


@pytest.mark.django_db
def test_what_has_no_way_back_any_more_is_finished_although_it_is_cancelled(people: People) -> None:
    operation = start("tests.waits", plan={"go on": True})
    for _ in range(3):  # a, b, and c, which is final
        services.advance(operation.pk)
    services.cancel(people.principal("platform_admin"), operation.pk)
    operation = run(operation)
    assert (operation.state, operation.cancel_requested) == (State.SUCCEEDED, True)
    assert effects() == ["a", "c"]


@pytest.mark.django_db
def test_one_at_a_time_works_on_a_target_and_the_next_may_begin_after_it() -> None:
    first = start("tests.waits")
    with pytest.raises(services.Busy) as refused:
        start("tests.steps")
    assert refused.value.operation.pk == first.pk
    start("tests.steps", "session:other")
    Operation.objects.filter(pk=first.pk).update(plan={"go on": True})
    run(first)
    start("tests.steps")


@pytest.mark.django_db(transaction=True)
def test_of_many_that_start_at_once_on_one_target_one_does() -> None:
    barrier, outcomes = threading.Barrier(4), []

    def begin() -> None:
        try:
            barrier.wait(30)
            start("tests.waits")
            outcomes.append("began")
        except services.Busy:
            outcomes.append("busy")
        finally:
            connection.close()

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["began", "busy", "busy", "busy"]


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("kind", "state", "expected"),
    [
        ("tests.steps", State.SUCCEEDED, ["a", "b", "c"]),
        ("tests.fails", State.FAILED, ["a", "not b", "not a"]),
    ],
)
def test_a_worker_that_is_killed_at_any_query_changes_nothing_in_the_result(
    kind: str, state: State, expected: list[str]
) -> None:
    number, finished = 0, False
    while not finished:
        number += 1
        operation = start(kind, f"session:s{number}")
        try:
            with killed_at_query(number):
                run(operation)
            finished = True
        except Killed:
            connection.close()  # as the server sees it
        assert run(operation).state == state, number
        assert effects(operation) == expected, number
    assert number > 20


HOLDING = """
import django; django.setup()
import redis, signal
from django.conf import settings
from console.operations import services
from console.operations.machines import Step
from tests.console.operations import machines
def hold(operation):
    machines.effect(operation, "of the killed")
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.rpush("tests:held", 1)
    signal.pause()
machines.Steps.steps = (machines.Steps.steps[0], Step("b", "Then", hold), machines.Steps.steps[2])
while services.advance("{id}"): pass
"""


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_process_that_is_killed_in_a_step_is_followed_by_another() -> None:
    broker = redis.Redis.from_url(settings.REDIS_URL)
    broker.delete("tests:held")
    operation = start()
    name = connection.settings_dict["NAME"]
    database_url = os.environ["DATABASE_URL"].replace("/tidegate?", f"/{name}?")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING.replace("{id}", str(operation.pk))],
        cwd=PROJECT,
        env={**os.environ, "DATABASE_URL": database_url, "DJANGO_SETTINGS_MODULE": "console.settings"},
    )
    try:
        wait_until("the step is begun", lambda: broker.llen("tests:held"), 60)
        assert not services.advance(operation.pk), "while it is held by one, another does nothing"
    finally:
        process.kill()
        process.wait(30)
        broker.close()
    with transaction.atomic():  # waits until the server has seen that its client is gone
        Operation.objects.select_for_update().get(pk=operation.pk)
    assert run(operation).state == State.SUCCEEDED
    assert effects() == ["a", "b", "c"]


@pytest.mark.django_db(transaction=True)
def test_a_step_that_never_ends_well_or_badly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(operation: Operation) -> Any:
        raise Killed

    broken = (machines.Steps.steps[0], Step("b", "Then", dies), machines.Steps.steps[2])
    monkeypatch.setattr(machines.Steps, "steps", broken)
    operation = start()
    deaths = 0
    while True:
        try:
            run(operation)
            break
        except Killed:
            deaths += 1
            assert deaths <= core.ATTEMPTS_MAX
    assert operation.state == State.FAILED
    assert operation.error
    assert operation.error["reason"] == "NeverEnds"
    assert effects() == ["a", "not a"]


@pytest.mark.django_db(transaction=True)
def test_a_step_gives_its_worker_back_while_the_fleet_is_held_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker waited until it was stopped, which counted as an attempt, and there may be only two."""

    def plans(operation: Operation) -> Outcome:
        machines.effect(operation, "before")
        lock_fleet()
        return Done()

    first, _, last = machines.Steps.steps
    monkeypatch.setattr(machines.Steps, "steps", (first, Step("b", "Then", plans), last))
    monkeypatch.setattr(services, "LOCKED_SECONDS_MAX", 0.05)
    operation = start()
    with contextlib.closing(connection.copy()) as other, other.cursor() as cursor:
        cursor.execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('placement'))")
        for _ in range(3):
            run(operation)
            assert (operation.state, operation.step, operation.attempts) == (State.RUNNING, 1, 0)
            assert operation.message == services.IS_LOCKED
            assert services.take_due(timezone.now()) == [], "others have the worker for a while"
            assert services.take_due(timezone.now() + services.LOCKED_FOR) == [operation.pk]
        cursor.execute("ROLLBACK")
    assert "tests.steps of session:chat waits: something is locked" in caplog.text
    assert run(operation).state == State.SUCCEEDED
    assert operation.message == "c is done"
    assert effects() == ["a", "before", "c"]


@pytest.mark.django_db
def test_the_sweep_finds_what_is_due_once_and_what_was_lost_again() -> None:
    operation = start("tests.waits")
    now = timezone.now()
    assert services.take_due(now) == [operation.pk]
    assert services.take_due(now) == []
    assert services.take_due(now + services.TAKEN_FOR_LOST) == [operation.pk]
    Operation.objects.filter(pk=operation.pk).update(plan={"go on": True})
    run(operation)
    assert services.take_due(now + timedelta(hours=1)) == []


@pytest.mark.django_db
def test_a_clock_that_was_ahead_makes_no_operation_wait_for_hours() -> None:
    operation = run(start("tests.waits"))
    assert services.take_due(operation.wake_at - timedelta(minutes=1)) == []
    assert services.take_due(operation.wake_at - timedelta(hours=2)) == [operation.pk]


@pytest.mark.django_db
def test_what_ended_long_ago_is_forgotten_and_what_goes_on_is_not() -> None:
    ended, going_on = run(start()), start("tests.waits", "session:other")
    long_ago = timezone.now() - services.KEPT - timedelta(days=1)
    Operation.objects.filter(pk=ended.pk).update(done_at=long_ago)
    Operation.objects.filter(pk=going_on.pk).update(created_at=long_ago)
    forget_what_is_over()
    assert list(Operation.objects.all()) == [going_on]


def test_the_newest_has_the_greatest_id() -> None:
    first = new_id()
    assert first.version == 7
    while new_id().int >> 80 == first.int >> 80:  # the same millisecond
        pass
    assert new_id() > first


# Over REST and on pages


@pytest.mark.django_db
def test_rest_tells_progress_and_cancels(people: People, api_of: Callable[..., Client]) -> None:
    operation = run(start("tests.waits", org_id=people.acme.pk))
    client = api_of(people.on_call)
    address = f"/api/v1/operations/{operation.pk}"
    told = client.get(address).json()
    assert told["progress"] == {"step": 1, "total": 4, "percent": 37, "message": "It waits."}
    assert (told["done"], told["error"], told["response"]) == (False, None, None)
    listed = client.get("/api/v1/operations?target=session:chat&kind=tests&done=false").json()["items"]
    assert [item["id"] for item in listed] == [str(operation.pk)]
    assert client.get("/api/v1/operations?done=true").json()["items"] == []
    assert client.get("/api/v1/operations?kind=test").json()["items"] == []
    first, second = client.delete(address), client.delete(address)
    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json()["cancel_requested"]
    run(operation)
    told = client.get(address).json()
    assert (told["state"], told["error"]) == (
        "cancelled",
        {"reason": "Cancelled", "detail": "It was cancelled."},
    )
    assert client.post(f"{address}/retry").json()["reason"] == "Conflict"


@pytest.mark.django_db
def test_the_pages_tell_the_same_to_those_who_may_see_it(
    people: People, browser_of: Callable[..., Client]
) -> None:
    operation = run(start("tests.waits", org_id=people.acme.pk))
    page = browser_of(people.viewer).get(f"/operations/{operation.pk}/").content.decode()
    assert "It waits." in page
    assert "37 %" in page
    assert ">Cancel<" not in page
    on_call = browser_of(people.on_call)
    assert ">Cancel<" in compact(on_call.get(f"/operations/{operation.pk}/"))
    beyond = start("tests.waits", "session:other", plan={"go on": True}, org_id=people.acme.pk)
    for _ in range(3):  # c is final
        services.advance(beyond.pk)
    assert ">Cancel<" not in on_call.get(f"/operations/{beyond.pk}/").content.decode()
    part = on_call.get(f"/operations/{operation.pk}/", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in part
    assert "Do tests.waits" in on_call.get("/operations/").content.decode()
    assert "Do tests.waits" not in browser_of(people.stranger).get("/operations/").content.decode()


@pytest.mark.django_db
def test_lists_take_as_many_queries_for_many_as_for_one(
    people: People, api_of: Callable[..., Client], django_assert_max_num_queries: Any
) -> None:
    for number in range(20):
        start(target=f"session:s{number}")
    client = api_of(people.platform_viewer)
    with django_assert_max_num_queries(5):
        assert len(client.get("/api/v1/operations").json()["items"]) == 20


@pytest.mark.django_db
def test_a_list_goes_on_page_by_page(people: People, api_of: Callable[..., Client]) -> None:
    begun = [str(start(target=f"session:s{number}").pk) for number in range(3)]
    client = api_of(people.platform_viewer)
    first = client.get("/api/v1/operations?limit=2").json()
    rest = client.get(f"/api/v1/operations?limit=2&cursor={first['next_cursor']}").json()
    assert [one["id"] for one in [*first["items"], *rest["items"]]] == sorted(begun, reverse=True)
    assert rest["next_cursor"] is None


@pytest.mark.django_db
def test_a_stuck_operation_of_another_version_is_not_retried(
    people: People, api_of: Callable[..., Client], browser_of: Callable[..., Client]
) -> None:
    operation = run(start("tests.no-way-back"))
    Operation.objects.filter(pk=operation.pk).update(kind="future.kind")
    answer = api_of(people.platform_admin).post(f"/api/v1/operations/{operation.pk}/retry")
    sentence = "This version of the console does not know the kind “future.kind”."
    assert (answer.status_code, answer.json()["reason"]) == (409, "Conflict")
    assert answer.json()["detail"] == sentence
    page = browser_of(people.platform_admin).post(f"/operations/{operation.pk}/retry/", follow=True)
    assert sentence in page.content.decode()
    operation.refresh_from_db()
    assert operation.state == State.STUCK
