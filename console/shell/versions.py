"""The version of the running console."""

from __future__ import annotations

import platform
from importlib import metadata

import redis
from django.conf import settings
from django.db import DatabaseError, connection

from console.redis_client import connected

PACKAGES = ("django", "channels", "celery", "redis", "psycopg", "django-ninja", "plotly", "uvicorn")


def report() -> dict[str, str]:
    versions = {"tidegate": settings.VERSION, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in PACKAGES}
    versions["postgresql"] = _postgresql()
    versions["redis server"] = _redis_server()
    return versions


def _postgresql() -> str:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            return str(cursor.fetchone()[0])
    except DatabaseError:
        return "does not answer"


def _redis_server() -> str:
    try:
        with connected(settings.REDIS_URL, 2) as client:
            return str(client.info("server")["redis_version"])
    except redis.RedisError:
        return "does not answer"
