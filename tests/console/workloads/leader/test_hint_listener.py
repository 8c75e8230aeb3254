"""Hints are heard as they come, on a connection that is made anew where it breaks."""

from __future__ import annotations

import pytest
from django.db import connection

from console.workloads.changes import INTENT
from console.workloads.leader.hint_listener import HintListener
from telemetry.hints import CHANNEL, hint
from telemetry.topics import of_workload
from tests.live import wait_until


@pytest.mark.django_db(transaction=True)
def test_hints_are_heard_over_broken_connections_and_the_end_at_once() -> None:
    heard: list[str | None] = []
    listener = HintListener(heard.append)

    def listens_and_hears(number: int) -> None:
        wait_until("it listens", lambda: heard.count(None) == number)
        names = {f"chat-{number}", f"code-{number}"}
        hint(map(of_workload, names), INTENT)
        wait_until("it hears", lambda: names <= set(heard))

    listener.start()
    listens_and_hears(1)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query = %s",
            [f"LISTEN {CHANNEL}"],
        )
    listens_and_hears(2)
    listener.stop()
    assert not listener._thread.is_alive()
