"""Whether this process can do its work, and if not, why."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor

from console.environment import MANAGE
from console.redis_client import connected
from telemetry.units import counted

TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    reason: str  # empty when all is well
    took_ms: float


def _postgres() -> str:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError as error:
        return f"PostgreSQL does not answer: {_first_line(error)}"
    return ""


def _migrations() -> str:
    try:
        executor = MigrationExecutor(connection)
        missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError:
        return "unknown, because PostgreSQL does not answer"
    if missing:
        not_applied = counted(len(missing), "migration is", "migrations are")
        return f"{not_applied} not applied: run `{MANAGE} migrate`"
    return ""


def _redis() -> str:
    try:
        with connected(settings.REDIS_URL, TIMEOUT_SECONDS) as client:
            client.ping()
    except redis.RedisError as error:
        return f"Redis does not answer: {_first_line(error)}"
    return ""


CHECKS: dict[str, Callable[[], str]] = {
    "postgres": _postgres,
    "migrations": _migrations,
    "redis": _redis,
}


# Without its Redis a console shows pages and answers the API. And all webs have the same one: none would
# be ready, so that a balancer would take away all of the console for what a part of it lacks.
NOT_DECISIVE: Final = frozenset({"redis"})


def run_checks() -> list[Check]:
    results = []
    for name, check in CHECKS.items():
        started = time.perf_counter()
        reason = check()
        took_ms = round((time.perf_counter() - started) * 1000, 1)
        results.append(Check(name, ok=not reason, reason=reason, took_ms=took_ms))
    return results


def report() -> dict[str, Any]:
    checks = run_checks()
    return {
        "live": True,
        "ready": all(check.ok for check in checks if check.name not in NOT_DECISIVE),
        "degraded": not all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def _first_line(error: Exception) -> str:
    """The gist of an error, without the connection's details: anyone may read this page."""
    return type(error).__name__
