"""The broker's Redis as Celery takes it: other URLs, and options beside them.

A worker waits for work at its broker for a second at a time. If an answer is overdue, the connection
counts as broken: a Redis that is stopped, and not gone, would be waited for forever.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from telemetry.redis_address import RedisAddress, parse

ANSWER_SECONDS: Final = 3.0
OVERDUE_SECONDS: Final = 2  # beyond the second that a worker waits; looked at as often


@dataclass(frozen=True)
class Broker:
    """What Celery's settings say of it."""

    url: str
    options: dict[str, Any]
    tls: dict[str, Any] | None


def broker(url: str) -> Broker:
    """Raises ValueError."""
    address = parse(url)
    options = {
        "socket_timeout": ANSWER_SECONDS,
        "socket_connect_timeout": ANSWER_SECONDS,
        "health_check_interval": OVERDUE_SECONDS,
    }
    if not address.has_sentinels:
        return Broker(_url(url, address), options, None)
    from telemetry.redis_clients import sentinel_options  # which takes a while

    # Celery takes each Sentinel for a broker of its own, so each has the credentials and the database.
    sentinels = ";".join(
        address.plain(place, scheme="sentinel", has_options=False) for place in address.places
    )
    named = {
        "master_name": address.primary,
        "sentinel_kwargs": sentinel_options(address, ANSWER_SECONDS),
    }
    return Broker(sentinels, {**options, **named}, _tls(address))


def _tls(address: RedisAddress) -> dict[str, Any] | None:
    if not address.is_tls:
        return None
    from telemetry.redis_clients import connection_options

    given = {
        name: value for name, value in connection_options(address).items() if name.startswith("ssl_")
    }
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED, **given}


def _url(url: str, address: RedisAddress) -> str:
    """One server, as Celery's transport spells it."""
    if not address.path:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        query.pop("protocol", None)  # over TCP the transport refuses what it does not know
        return urlunsplit(parts._replace(query=urlencode(query)))
    at = f"{address.user}:{address.password}@" if address.password else ""
    query = {**dict(address.options), "virtual_host": str(address.database)}
    return urlunsplit(("redis+socket", at, address.path, urlencode(query), ""))
