"""One of any number of processes acts: whoever has an advisory lock of PostgreSQL, on the connection
that it also writes on.

The lock ends with the connection, and so with the process. And a leader that has lost its connection has
lost every transaction on it: what it would write comes too late, and is not written. Elections by leases
(as Kubernetes has them) cannot promise that: two may think that they lead while clocks disagree.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from django.db import DatabaseError, connection, transaction

log = logging.getLogger(__name__)

TRY_SECONDS: Final = 1.0  # between two attempts to become the leader
# Where a machine is gone without a word, the server notices after about four seconds.
_NOTICE: Final = (
    "SET tcp_keepalives_idle = 1",
    "SET tcp_keepalives_interval = 1",
    "SET tcp_keepalives_count = 3",
)
# What `run` has set, for whoever has the connection next.
_FORGET: Final = (
    "RESET tcp_keepalives_idle",
    "RESET tcp_keepalives_interval",
    "RESET tcp_keepalives_count",
    "RESET lock_timeout",
    "RESET application_name",
)

ORCHESTRATORS: Final = "tidegate orchestrator"  # the name of their election


def is_led(name: str) -> bool:
    """Whether anybody leads in the election of this name."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted "
            "AND objsubid = 1 "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND (classid::bigint << 32 | objid::bigint) = hashtextextended(%s, 0))",
            [name],
        )
        [found] = cursor.fetchone()
    return bool(found)


class NotLeader(Exception):
    """Somebody else may lead by now."""


class Election:
    """Of one name, on this thread's connection. `lock_ms`: that connection waits no longer for a lock of
    others; 0: as long as it takes."""

    def __init__(self, name: str, lock_ms: int = 0) -> None:
        self.name = name
        self._lock_ms = lock_ms
        self._held: Any = None
        self._shown = f"{name} {os.getpid()}"  # in pg_stat_activity: who leads

    @property
    def is_leader(self) -> bool:
        return self._held is not None

    def run(self) -> bool:
        """Become the leader if nobody else is. Raises django.db.Error."""
        if self._held is not None and self._held is connection.connection:
            return True
        self._let_go()
        connection.ensure_connection()
        with connection.cursor() as cursor:
            for statement in _NOTICE:
                cursor.execute(statement)
            if self._lock_ms:
                cursor.execute(f"SET lock_timeout = {self._lock_ms:d}")
            cursor.execute("SELECT set_config('application_name', %s, false)", [self._shown])
            cursor.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [self.name])
            [is_ours] = cursor.fetchone()
        if is_ours:
            self._held = connection.connection
            log.info("This process leads: %s", self.name)
        return bool(is_ours)

    def check(self, asked: str = "TRUE", parameters: Mapping[str, Any] | None = None) -> bool:
        """Whether it still leads: asks the server, and with that whether something else is so. Raises
        NotLeader."""
        if self._held is None or self._held is not connection.connection or self._held.closed:
            self.lose()
            raise NotLeader
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {asked}", parameters)
            [is_so] = cursor.fetchone()
        return bool(is_so)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """A transaction of the leader: it is written on the connection that has the lock, or not at all.
        Raises NotLeader."""
        with transaction.atomic():
            if self._held is None or self._held is not connection.connection:
                self.lose()
                raise NotLeader
            yield

    def resign(self) -> None:
        """Let another one lead at once. The connection goes back to its pool without the lock, and as it
        came: a pool that gets one which was ended warns of it."""
        held = self._held
        if held is None or held is not connection.connection or held.closed:
            self.lose()
            return
        try:
            with connection.cursor() as cursor:
                for statement in _FORGET:
                    cursor.execute(statement)
                cursor.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [self.name])
        except DatabaseError:
            self.lose()
            return
        self._held = None
        log.info("This process leads no more: %s", self.name)
        if not connection.in_atomic_block:
            connection.close()

    def lose(self) -> None:
        """Not to lead any more."""
        if self._held is not None:
            log.warning("This process leads no more: %s", self.name)
        self._let_go()
        if not connection.in_atomic_block:
            connection.close()

    def _let_go(self) -> None:
        """End the connection that has the lock, unless a transaction is under way on it. A pool would
        keep it open, and with it the lock: then nobody leads, since the next attempt may be on another
        one."""
        held, self._held = self._held, None
        is_used = connection.in_atomic_block and held is connection.connection
        if held is not None and not is_used:
            held.close()
