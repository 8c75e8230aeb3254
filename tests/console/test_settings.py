"""What the settings make of PostgreSQL's pool."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
from django.conf import settings
from psycopg_pool import ConnectionPool, PoolTimeout

from console.settings import _database


def test_a_database_that_was_away_is_used_when_it_is_back(django_db_setup: None) -> None:
    """Pools wait longer and longer between attempts. Nobody who asks waits for a late one."""
    is_back = False

    class Connection(psycopg.Connection[Any]):
        @classmethod
        def connect(cls, *_: Any, **__: Any) -> Any:
            if not is_back:
                raise psycopg.OperationalError("refused")
            return psycopg.connect(settings.LISTEN_URL)

    options = _database({}, wait_seconds=0.2)["OPTIONS"]["pool"]
    with contextlib.closing(ConnectionPool(connection_class=Connection, open=False, **options)) as pool:

        def asked(times: int) -> bool:
            for _ in range(times):
                with contextlib.suppress(PoolTimeout):
                    pool.putconn(pool.getconn())
                    return True
            return False

        pool.open()
        assert not asked(6)  # By default the attempt after that of the first second is in the third.
        is_back = True
        assert asked(7)
