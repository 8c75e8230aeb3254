"""Two transactions that wait for each other: the database ends one, and a person hears nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import OperationalError, connection, transaction
from django.test import Client
from psycopg.errors import DeadlockDetected

from console.accounts.models import User
from console.orgs import services
from console.shell.transactions import retried
from tests.conftest import People


@pytest.mark.django_db(transaction=True)
def test_of_two_that_wait_for_each_other_both_are_done(caplog: pytest.LogCaptureFixture) -> None:
    both, done = threading.Barrier(2), list[str]()

    def change(first: int, second: int, tries: list[int]) -> str:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [first])
            tries.append(1)
            if len(tries) == 1:
                both.wait(30)
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [second])
            return f"{first}, {second}"

    def beside(first: int, second: int) -> None:
        tries: list[int] = []
        try:
            done.append(retried(lambda: change(first, second, tries)))
        finally:
            connection.close()

    threads = [threading.Thread(target=beside, args=locks) for locks in ((71, 72), (72, 71))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == ["71, 72", "72, 71"]
    assert "begins again" in caplog.text


def test_what_else_a_database_says_is_not_tried_again() -> None:
    tries = []

    def change() -> None:
        tries.append(1)
        raise OperationalError("the server closed the connection")

    with pytest.raises(OperationalError, match="closed"):
        retried(change)
    assert len(tries) == 1


def test_a_page_that_was_ended_says_that_nothing_was_changed(
    people: People, browser_of: Callable[[User], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> None:
        raise OperationalError("deadlock detected") from DeadlockDetected()

    monkeypatch.setattr(services, "delete_org", ended)
    answer = browser_of(people.platform_admin).post(
        "/orgs/acme/delete/", {"typed": "acme", "reason": "ended"}
    )
    assert (answer.status_code, answer["Retry-After"]) == (503, "1")
    assert "Nothing was changed" in answer.content.decode()
