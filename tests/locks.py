"""Who waits for whom in the database of a test."""

from __future__ import annotations

from django.db import connection


def somebody_waits() -> bool:
    """Whether a connection to this test's database waits for a lock that another one has. What those of
    other tests wait for on the same server, says nothing of this one."""
    with connection.cursor() as cursor:
        # A transaction goes on seeing the connections that there were when it looked first.
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
            "AND cardinality(pg_blocking_pids(pid)) > 0)"
        )
        return bool(cursor.fetchone()[0])
