"""What is done beside requests: to notice who is silent, and which stores are empty."""

from __future__ import annotations

import logging

from console.fleet import cpu_guard, retired_stores
from console.fleet.membership import liveness, telemetry_users
from console.periodic import periodic
from telemetry.units import counted

log = logging.getLogger(__name__)


@periodic
def find_who_is_lost() -> None:
    if lost := liveness.find_lost(liveness.database_now()):
        log.warning("%s lost", counted(lost, "node or driver is", "nodes and drivers are"))


@periodic
def keep_telemetry_users() -> None:
    """Each process that has joined can tell its numbers, and nobody else's."""
    telemetry_users.keep_users()


@periodic
def measure_cpu_of_shards() -> None:
    cpu_guard.measure()


@periodic
def look_after_retiring_stores() -> None:
    retired_stores.look()
