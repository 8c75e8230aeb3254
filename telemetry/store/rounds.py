"""Running a service in rounds until SIGTERM: what ingest and roll-up have in common."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Final

import redis
from django.db import Error as DatabaseError
from django.db import close_old_connections

from telemetry.notify import notify
from telemetry.stop import StopSignal

log = logging.getLogger(__name__)

PAUSE_AFTER_FAULT_SECONDS: Final = 1.0


def run_rounds(one_round: Callable[[], float]) -> None:
    """Round after round, with the pause that each asks for, until SIGTERM or SIGINT. Redis and
    PostgreSQL come back by themselves: what was not finished is done again, also what is left since
    they do not answer when this process is told to stop.

    Garbage is searched for between rounds: a round is some hundred thousand objects, without circles,
    that are gone after it. To look through them as often as Python does, while they are made, takes two
    fifths of the reader's time.
    """
    gc.freeze()
    stopped = StopSignal()
    while not stopped.is_set():
        gc.disable()
        try:
            pause = stopped.run(one_round) or 0.0
        except (redis.RedisError, DatabaseError) as error:
            log.warning("waiting for Redis or PostgreSQL: %s", error)
            close_old_connections()
            pause = PAUSE_AFTER_FAULT_SECONDS
        finally:
            gc.enable()
        notify("WATCHDOG=1")
        stopped.wait(pause)
    notify("STOPPING=1")
    close_old_connections()
