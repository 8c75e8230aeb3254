"""Clients of Redis for every process, made from an address. No Django.

With Sentinels a client asks them for the primary whenever it connects. So a caller that tries again
after a failure, as it does with a single server, comes to the new primary. Nothing here tries twice by
itself: only the caller knows whether that does no harm, and what else it could do meanwhile.
"""

from __future__ import annotations

from typing import Any, Final

import redis
from redis import asyncio as aio
from redis.asyncio import sentinel as aio_sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from telemetry.redis_address import RedisAddress, parse

SENTINEL_SECONDS_MAX: Final = 0.5  # one that is stopped costs so much before the next is asked
_OF_THE_SERVER: Final = ("host", "port", "connection_class")


def client(url: str, *, answer_seconds: float, **more: Any) -> redis.Redis:
    """For threads. An answer, or a connection, may take so long. Connects when it is first used. Raises
    ValueError for an address that can't be used."""
    address, given = parse(url), {**_common(answer_seconds), **more}
    if not address.has_sentinels:
        return redis.Redis.from_url(address.plain(), **given)
    return redis.Redis.from_pool(_Pool(address, given))


def async_client(url: str, *, answer_seconds: float, **more: Any) -> aio.Redis:
    """For one event loop. As `client`."""
    address, given = parse(url), {**_common(answer_seconds), **more, "retry": AsyncRetry(NoBackoff(), 0)}
    if not address.has_sentinels:
        return aio.Redis.from_url(address.plain(), **given)
    return aio.Redis.from_pool(_AsyncPool(address, given))


def check_options(address: RedisAddress) -> None:
    """Whether the client takes the options of this address. It says so when it connects, long after the
    start. Raises ValueError."""
    try:
        redis.ConnectionPool.from_url(address.plain()).make_connection()  # which connects to nobody yet
    except (TypeError, redis.RedisError) as error:
        raise ValueError("Its options are none of the client's") from error


def sentinel_options(address: RedisAddress, answer_seconds: float) -> dict[str, Any]:
    """How a connection to a Sentinel is made, without its place."""
    found = parse_url(address.of_sentinel())  # type: ignore[no-untyped-call]
    for name in _OF_THE_SERVER:
        found.pop(name, None)
    tls = {"ssl": True} if address.is_tls else {}
    seconds = min(answer_seconds, SENTINEL_SECONDS_MAX)
    return {**found, **tls, **_common(seconds), "retry": Retry(NoBackoff(), 0)}


def connection_options(address: RedisAddress) -> dict[str, Any]:
    """How a connection to the primary is made, without its place."""
    found = parse_url(address.plain())  # type: ignore[no-untyped-call]
    for name in _OF_THE_SERVER:
        found.pop(name, None)
    return dict(found)


def database(url: str) -> int:
    """The one that an address names; the first one is 0. Raises ValueError as `client`."""
    return int(connection_options(parse(url)).get("db", 0))


def _common(answer_seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": answer_seconds,
        "socket_connect_timeout": answer_seconds,
        "driver_info": None,  # not every user may say what client it is
    }


class _Pool(SentinelConnectionPool):
    """Connections to the primary, and with them those to Sentinels."""

    def __init__(self, address: RedisAddress, given: dict[str, Any]) -> None:
        sentinels = Sentinel(  # type: ignore[no-untyped-call]
            address.places, sentinel_kwargs=sentinel_options(address, given["socket_timeout"])
        )
        kind = SentinelManagedSSLConnection if address.is_tls else SentinelManagedConnection
        super().__init__(  # type: ignore[no-untyped-call]
            address.primary,
            sentinels,
            connection_class=kind,
            **{**given, **connection_options(address)},
        )

    def close(self) -> None:
        super().close()
        for sentinel in self.sentinel_manager.sentinels:
            sentinel.close()


class _AsyncPool(aio_sentinel.SentinelConnectionPool):
    """As `_Pool`."""

    def __init__(self, address: RedisAddress, given: dict[str, Any]) -> None:
        options = sentinel_options(address, given["socket_timeout"])
        sentinels = aio_sentinel.Sentinel(  # type: ignore[no-untyped-call]
            address.places, sentinel_kwargs={**options, "retry": given["retry"]}
        )
        kind = (
            aio_sentinel.SentinelManagedSSLConnection
            if address.is_tls
            else aio_sentinel.SentinelManagedConnection
        )
        super().__init__(  # type: ignore[no-untyped-call]
            address.primary,
            sentinels,
            connection_class=kind,
            **{**given, **connection_options(address)},
        )

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()
