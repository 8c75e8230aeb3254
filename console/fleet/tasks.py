"""What is done beside requests: to notice who is silent, and which stores are empty."""

from __future__ import annotations

import logging

from celery import shared_task

from console.fleet import cpu_guard, retired_stores
from console.fleet.membership import liveness, telemetry_users

log = logging.getLogger(__name__)


@shared_task
def find_who_is_lost() -> None:
    if lost := liveness.find_lost(liveness.database_now()):
        log.warning("%d nodes and drivers are lost", lost)


@shared_task
def keep_telemetry_users() -> None:
    """Each process that has joined can tell its numbers, and nobody else's."""
    telemetry_users.keep_users()


@shared_task
def measure_cpu_of_shards() -> None:
    cpu_guard.measure()


@shared_task
def look_after_retiring_stores() -> None:
    retired_stores.look()
