"""Reading history from a standby, where there is one and it is not far behind.

Only what people look at is read there: numbers of charts. What decides something (alerts, the
orchestrator, policies) reads from the primary, where nothing is missing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from django.db import DatabaseError, connection, connections

from telemetry.metrics import Catalog, Sink

log = logging.getLogger(__name__)

HISTORY: Final = "history"  # in Django's DATABASES
BEHIND_SECONDS_MAX: Final = 10
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

    @contextlib.contextmanager
    def cursor(self) -> Iterator[Any]:
        """Of the standby if one is set, answers, and has applied what was written ten seconds ago; else
        of the primary."""
        is_set = HISTORY in connections
        is_standby = is_set and time.monotonic() >= self._away_until and self._is_current()
        if is_set:
            self.reads["standby" if is_standby else "primary"] += 1
        with (connections[HISTORY] if is_standby else connection).cursor() as made:
            yield made

    def collect(self, into: Sink) -> None:
        into.put(READS, [({"server": server}, count) for server, count in self.reads.items()])

    def _is_current(self) -> bool:
        try:
            with connections[HISTORY].cursor() as asking:
                asking.execute(
                    "SELECT NOT pg_is_in_recovery() OR "
                    "pg_last_xact_replay_timestamp() > now() - make_interval(secs => %s)",
                    [BEHIND_SECONDS_MAX],
                )
                [is_current] = asking.fetchone()
        except DatabaseError as error:
            log.warning("Charts are read from the primary, since the standby is away: %s", error)
            self._away_until = time.monotonic() + AGAIN_SECONDS
            return False
        if not is_current:
            log.warning("Charts are read from the primary, since the standby is behind.")
        return bool(is_current)


OF_THIS_PROCESS: Final = History()
