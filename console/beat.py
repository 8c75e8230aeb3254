"""The schedule of periodic tasks, for any number of beats: one is elected and fires, the others wait.

As with orchestrators, who leads has an advisory lock on its connection to PostgreSQL; another one takes
over within seconds. Who takes over begins with the next time of each task: what was due while nobody led
is left out, and nothing is fired twice.
"""

from __future__ import annotations

import logging
import signal
import sys
from datetime import datetime
from typing import Any, Final

from celery.beat import Scheduler
from django.db import Error as DatabaseError

from console.fleet.membership.heartbeats import missed_seconds
from console.operations.core import MOVING
from console.workloads.leader.election import TRY_SECONDS, Election, NotLeader
from telemetry.stop import LEAVE_SECONDS, STOPS, exit_within

log = logging.getLogger(__name__)

LOCK: Final = "tidegate beat"
# Without workers nobody takes anything: expired messages would fill the broker's memory within days, and
# then it would take none. Of each priority, since the highest one waits for no other.
WAITING_MAX: Final = 1_000
LOCK_MS: Final = 200  # for which it may be kept from asking what is needed, as a migration does
# What is sent only where it has something to do: a message takes longer than to ask, with the statement
# that says whether this beat still leads.
ONLY_IF: Final = {
    "console.operations.tasks.sweep_operations": (
        "EXISTS (SELECT FROM operations_operation WHERE NOT done AND state = ANY(%(moving)s))"
    ),
    "console.sessions.tasks.replace_lost_nodes": (
        "EXISTS (SELECT FROM fleet_node WHERE joined_at IS NOT NULL "
        "AND last_heartbeat_at < clock_timestamp() - make_interval(secs => %(missed)s)) "
        "OR EXISTS (SELECT FROM cache_sessions_loss)"
    ),
    "console.sessions.tasks.forget_former_homes": "EXISTS (SELECT FROM cache_sessions_formerhome)",
    "console.policies.tasks.run_due": (
        "EXISTS (SELECT FROM policies_scheduledpolicy "
        "WHERE state = 'waiting' AND starts_at <= clock_timestamp() "
        "OR state = 'in force' AND ends_at <= clock_timestamp())"
    ),
}


class ElectedScheduler(Scheduler):
    """Celery's scheduler, which fires while it leads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._election = Election(LOCK, LOCK_MS)
        self._held_back: set[int] = set()  # priorities of which too many messages wait
        self._refused: set[str] = set()  # tasks of which PostgreSQL does not say whether they are needed
        self._ticked_at: datetime | None = None
        super().__init__(*args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Fire what is due. Returns after how many seconds to come again."""
        try:
            if not self._election.is_leader:
                if not self._election.run():
                    return TRY_SECONDS
                self._begin()
            elif self._ticked_at and self.app.now() < self._ticked_at:
                self._begin_later_ones()
            self._ticked_at = self.app.now()
            # Whether it still leads is asked before each message, once a second at least.
            return min(float(super().tick(*args, **kwargs)), TRY_SECONDS)
        except (NotLeader, DatabaseError) as error:
            log.warning("Beat does not lead: %s", str(error) or "its connection has ended")
            self._election.lose()
            return TRY_SECONDS

    def adjust(self, n: Any, drift: float = 0.0) -> Any:
        """Seconds until a time. Celery's are 10 ms fewer, for which it turns round and round."""
        return super().adjust(n, drift)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Raises NotLeader."""
        if self._is_needed(entry.task) and not self._must_wait(entry, producer):
            super().apply_entry(entry, producer=producer)

    def _is_needed(self, task: str) -> bool:
        """Whether the task has something to do. Where PostgreSQL refuses to say, while another release's
        tables are there or a migration has locked them, it does: no task must keep the others from being
        sent. Raises NotLeader."""
        asked = {"moving": list(MOVING), "missed": missed_seconds()}
        try:
            is_needed = self._election.check(ONLY_IF.get(task, "TRUE"), asked)
        except DatabaseError as error:
            self._election.check()  # it fails as well if the connection has ended
            if task not in self._refused:
                log.warning("It is unknown whether %s is needed, so it is sent: %s", task, error)
            self._refused.add(task)
            return True
        self._refused.discard(task)
        return is_needed

    def _must_wait(self, entry: Any, producer: Any) -> bool:
        """Whether nobody does what was asked for before. False as well where the broker does not answer,
        or a lost connection has closed the channel: to publish opens another one."""
        priority = self.app.amqp.router.route({}, entry.task).get("priority", 0)
        if producer.channel.closed:
            return False
        try:
            waiting = producer.channel.waiting(self.app.conf.task_default_queue, priority)
        except (*producer.connection.connection_errors, *producer.connection.channel_errors):
            return False
        is_full: bool = waiting >= WAITING_MAX
        if is_full != (priority in self._held_back):
            self._held_back ^= {priority}
            log.warning(
                "Of priority %d %d tasks wait: %s",
                *(priority, waiting),
                "beat asks for no more. Are there workers?" if is_full else "beat goes on.",
            )
        return is_full

    def _begin(self) -> None:
        now = self.app.now()
        for entry in self.schedule.values():
            entry.last_run_at = now
        self._heap = None  # made anew from these times

    def _begin_later_ones(self) -> None:
        """The clock was set back: what was sent later than now would not be due until then. All else is
        due as before: a clock that is set back again and again keeps nothing from being sent."""
        now = self.app.now()
        for entry in self.schedule.values():
            entry.last_run_at = min(entry.last_run_at or now, now)
        self._heap = None

    def close(self) -> None:
        """Let another one lead."""
        self._election.resign()
        super().close()


def end_on_signals() -> None:
    """Have SIGTERM and SIGINT end beat in order, but LEAVE_SECONDS later or with a second one at once,
    since it may wait for a PostgreSQL that does not answer. Celery's handler closes the schedule in the
    middle of whatever it interrupts, and would wait for ever for the lock of a connection that has a
    statement."""

    def end(*_: object) -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)
        exit_within(LEAVE_SECONDS)  # and with its connection the lock ends
        sys.exit()

    for number in STOPS:
        signal.signal(number, end)
