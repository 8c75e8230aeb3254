"""Reading history from a standby, where there is one and it is not far behind.

Only what people look at is read there: numbers of charts. What decides something (alerts, the
orchestrator, policies) reads from the primary, where nothing is missing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from django.db import Error, InterfaceError, OperationalError, connection, connections

from telemetry.metrics import Catalog, Sink

log = logging.getLogger(__name__)

HISTORY: Final = "history"  # in Django's DATABASES
BEHIND_SECONDS_MAX: Final = 10
CONFLICTS: Final = ("40001", "40P01")  # SQLSTATEs of a query that is in the way
AGAIN_SECONDS: Final = 10.0  # until a standby that was away is asked again

METRICS: Final = Catalog()
READS: Final = METRICS.counter(
    "tidegate_history_reads_total",
    "Reads of numbers for charts by the server that answered, where `TIDEGATE_HISTORY_URL` is set: "
    "standby, or primary because the standby is behind or away.",
    "server",
)


class History:
    """Of one process."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self._away_until = 0.0

    def rows(self, select: str, asked: Mapping[str, Any]) -> list[Any]:
        """What a query finds: on the standby if one is set, has applied what was written 10 s ago,
        and answers; else on the primary. A standby may also cancel a query that is in the way of what it
        has to apply."""
        if HISTORY in connections:
            found = self._of_standby(select, asked)
            self.reads["primary" if found is None else "standby"] += 1
            if found is not None:
                return found
        with connection.cursor() as cursor:
            cursor.execute(select, asked)
            return list(cursor.fetchall())

    def collect(self, into: Sink) -> None:
        into.put(READS, [({"server": server}, count) for server, count in self.reads.items()])

    def _of_standby(self, select: str, asked: Mapping[str, Any]) -> list[Any] | None:
        if time.monotonic() < self._away_until:
            return None
        try:
            with connections[HISTORY].cursor() as asking:
                asking.execute(
                    "SELECT NOT pg_is_in_recovery() OR "
                    "pg_last_xact_replay_timestamp() > now() - make_interval(secs => %s)",
                    [BEHIND_SECONDS_MAX],
                )
                [is_current] = asking.fetchone()
                if is_current:
                    asking.execute(select, asked)
                    return list(asking.fetchall())
        except (OperationalError, InterfaceError) as error:
            if not _is_conflict(error) and connections[HISTORY].is_usable():
                raise  # the query's own fault, which it would be on the primary
            log.warning("Charts are read from the primary, since the standby does not answer: %s", error)
            self._away_until = time.monotonic() + AGAIN_SECONDS
            return None
        log.warning("Charts are read from the primary, since the standby is behind.")
        return None


def _is_conflict(error: Error) -> bool:
    """Whether PostgreSQL has cancelled a query because of what the standby has to apply."""
    return (getattr(error.__cause__, "sqlstate", None) or "") in CONFLICTS


OF_THIS_PROCESS: Final = History()
