"""One log of what happened: with what it tells of or not at all, in one order, and for whom it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client

from console.orgs import services
from telemetry.events import events_of, note
from telemetry.models import Event
from tests.conftest import People
from tests.live import wait_until
from tests.locks import somebody_waits


def rename(people: People, name: str) -> None:
    admin = people.principal("org_admin")
    with transaction.atomic():
        services.update_org(admin, services.for_change(admin, "acme"), name=name)


@pytest.mark.django_db
def test_a_change_is_an_event_of_its_org_and_of_the_fleet(
    people: People, api_of: Callable[..., Client]
) -> None:
    rename(people, "Acme Ltd")
    [event] = api_of(people.viewer).get("/api/v1/events?topic=org:acme").json()["items"]
    assert (event["kind"], event["sentence"]) == ("org.update", "Org Acme Ltd was changed.")
    assert event["topics"] == ["org:acme"]
    assert "before" not in event["data"], "the trail is for those who may see it"
    assert api_of(people.stranger).get("/api/v1/events?topic=org:acme").status_code == 404
    assert api_of(people.org_admin).get("/api/v1/events").status_code == 404
    [same] = api_of(people.platform_viewer).get("/api/v1/events?kind=org").json()["items"]
    assert same["topics"] == ["org:acme", "fleet"]


@pytest.mark.django_db
def test_whom_else_an_event_is_of_is_not_for_members_of_one_org(
    people: People, api_of: Callable[..., Client]
) -> None:
    with transaction.atomic():
        note("session.spine", ["org:acme", "org:globex", "session:s"], "A stream crosses the spine.")
    [event] = api_of(people.org_admin).get("/api/v1/events?topic=org:acme").json()["items"]
    assert event["topics"] == ["org:acme"]


@pytest.mark.django_db
def test_a_change_that_was_not_made_is_no_event(people: People) -> None:
    with transaction.atomic():
        rename(people, "Acme Ltd")
        transaction.set_rollback(True)
    assert not Event.objects.exists()


@pytest.mark.django_db
def test_events_are_found_by_topic_kind_and_time_page_by_page(
    people: People, api_of: Callable[..., Client]
) -> None:
    with transaction.atomic():
        for number in range(5):
            note("node.started", [f"node:ax-{number % 2}"], f"{number}")
        note("nodes", ["node:ax-0"], "another kind")
    client = api_of(people.platform_viewer)
    asked = "/api/v1/events?topic=node:ax-0&kind=node&order=oldest&limit=2"
    first = client.get(asked).json()
    rest = client.get(f"{asked}&cursor={first['next_cursor']}").json()
    assert [event["sentence"] for event in first["items"] + rest["items"]] == ["0", "2", "4"]
    assert rest["next_cursor"] is None
    late = client.get("/api/v1/events?since=2100-01-01T00:00:00Z").json()
    assert late["items"] == []
    assert events_of("node:ax-1").count() == 2


@pytest.mark.django_db(transaction=True)
def test_events_become_visible_in_the_order_of_their_numbers() -> None:
    """Whoever reads on from a number must never find a smaller one later."""
    noted, may_end = threading.Event(), threading.Event()
    seen: list[Any] = []

    def slow() -> None:
        try:
            with transaction.atomic():
                note("slow", [], "first")
                noted.set()
                may_end.wait(60)
        finally:
            connection.close()

    def quick() -> None:
        try:
            noted.wait(60)
            with transaction.atomic():
                note("quick", [], "second")
            seen.extend(Event.objects.order_by("pk").values_list("kind", flat=True))
        finally:
            connection.close()

    threads = [threading.Thread(target=one) for one in (slow, quick)]
    for thread in threads:
        thread.start()
    assert noted.wait(60)
    # It has to wait for the first, or it would be visible before.
    wait_until("the second waits", lambda: somebody_waits() or not threads[1].is_alive())
    assert not Event.objects.exists()
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert seen == ["slow", "quick"]


@pytest.mark.django_db
def test_an_event_is_noted_in_the_transaction_of_what_it_tells_of() -> None:
    atomic = transaction.get_connection()
    assert atomic.in_atomic_block
    assert note("x", ["org:a"] * 3, "y" * 1000).topics == ["org:a", "fleet"]
    many = note("x", [f"node:{number}" for number in range(99)], "y")
    assert len(many.topics) == 32
    assert many.topics[-1] == "fleet", "whatever does not fit"
