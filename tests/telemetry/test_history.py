"""Numbers of charts come from a standby where that answers, and else from the primary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections
from psycopg.conninfo import conninfo_to_dict

from telemetry.store.history import HISTORY, History
from tests.prepared import database

ONE, OF_A_TABLE = "SELECT %(one)s::int", "SELECT %(one)s::int FROM django_migrations LIMIT 1"
ASKED = {"one": 1}


@pytest.fixture
def empty_standby(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """One that answers, and fails each query for what is in a table."""
    with database() as url, django_db_blocker.unblock():
        name = conninfo_to_dict(url)["dbname"]
        connections.databases[HISTORY] = {**connection.settings_dict, "NAME": name}
        try:
            yield
        finally:
            connections[HISTORY].close()
            connections[HISTORY].close_pool()  # type: ignore[attr-defined]
            del connections[HISTORY]
            del connections.databases[HISTORY]
            connection.close()


def test_a_standby_that_answers_is_read(empty_standby: None) -> None:
    history = History()
    assert history.rows(ONE, ASKED) == [(1,)]
    assert history.reads == {"standby": 1}


def test_what_a_standby_fails_is_read_from_the_primary(empty_standby: None) -> None:
    """As where PostgreSQL cancels a query that is in the way of what the standby has to apply."""
    history = History()
    assert history.rows(OF_A_TABLE, ASKED) == [(1,)]
    assert history.rows(ONE, ASKED) == [(1,)]
    assert history.reads == {"primary": 2}, "it is left alone for a while"
