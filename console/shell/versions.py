"""What exactly is running here."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

import redis
from django.conf import settings
from django.db import DatabaseError, connection

from console.environment import PROJECT

PACKAGES = ("django", "channels", "celery", "redis", "psycopg", "django-ninja", "plotly", "uvicorn")


@cache
def tidegate_version() -> str:
    """The version in pyproject.toml: the project runs from its folder and is not installed."""
    for line in (PROJECT / "pyproject.toml").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "version":
            return value.strip().strip('"')
    raise RuntimeError("pyproject.toml names no version")


def report() -> dict[str, str]:
    versions = {"tidegate": tidegate_version(), "python": platform.python_version()}
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
    client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=2, socket_connect_timeout=2)
    try:
        return str(client.info("server")["redis_version"])
    except redis.RedisError:
        return "does not answer"
    finally:
        client.close()
