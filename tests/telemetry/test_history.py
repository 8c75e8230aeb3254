"""Numbers of charts come from a standby where that answers, and else from the primary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, ProgrammingError, connection, connections
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


LOST, CONFLICT, OWN = (
    "PERFORM pg_terminate_backend(pg_backend_pid())",
    "RAISE 'canceling statement due to conflict with recovery' USING ERRCODE = '40001'",
    "RAISE 'out of memory' USING ERRCODE = '53200'",
)


def fail_on_standby(how: str) -> str:
    """A query that does so there, and finds 1 on the primary."""
    for one in (connection, connections[HISTORY]):
        with one.cursor() as cursor:
            cursor.execute(
                "CREATE OR REPLACE FUNCTION pg_temp.number() RETURNS int LANGUAGE plpgsql AS $$ BEGIN "
                f"IF to_regclass('django_migrations') IS NULL THEN {how}; END IF; RETURN 1; END $$"
            )
    return "SELECT pg_temp.number()"


@pytest.mark.parametrize("how", [LOST, CONFLICT], ids=["lost", "conflict"])
def test_what_a_standby_can_not_answer_is_read_from_the_primary(empty_standby: None, how: str) -> None:
    history = History()
    assert history.rows(fail_on_standby(how), ASKED) == [(1,)]
    assert history.rows(ONE, ASKED) == [(1,)]
    assert history.reads == {"primary": 2}, "it is left alone for a while"


def test_a_query_that_is_at_fault_itself_is_not_run_again(empty_standby: None) -> None:
    history = History()
    with pytest.raises(OperationalError, match="out of memory"):
        history.rows(fail_on_standby(OWN), ASKED)
    with pytest.raises(ProgrammingError):
        history.rows(OF_A_TABLE, ASKED)
    assert history.rows(ONE, ASKED) == [(1,)]
    assert history.reads == {"standby": 1}
