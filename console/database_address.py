"""The address of PostgreSQL: one host, or several of which one takes writes. No Django.

    postgresql://user:password@one:5432,two:5432/tidegate?target_session_attrs=read-write

libpq reads it, so everything that it knows may stand behind the question mark. With several hosts each
new connection goes to the one that takes writes, unless the address says otherwise: after a promotion,
to the new primary.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from telemetry.redis_address import ESCAPE, WRONG_PORT, WrongAddress

HOSTS_MAX: Final = 8
WRITES: Final = "read-write"
# A host that is gone without a word is noticed by both: while it is connected to, and later.
_CONNECT_SECONDS: Final = 5
_CONNECT_SECONDS_OF_SEVERAL: Final = 2
_NOTICE: Final = {
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}


def parse(url: str, target: str = WRITES) -> dict[str, str]:
    """The parameters of libpq. `target`: which of several hosts is meant. Raises WrongAddress."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise WrongAddress("It does not begin with postgresql://.")
    try:
        given = conninfo_to_dict(url)
    except psycopg.Error as error:
        # Its first words; further on it repeats the address.
        said = _without_secrets(str(error).strip().partition(': "postgres')[0], url)
        raise WrongAddress(f"PostgreSQL's client does not take it: {said}.") from None
    found = {name: str(value) for name, value in given.items() if value is not None}
    hosts, ports = found.get("host", "").split(","), found.get("port", "").split(",")
    if not found.get("host") and not found.get("dbname"):
        raise WrongAddress("It names neither a host nor a database.")
    if len(hosts) > HOSTS_MAX:
        raise WrongAddress(f"It names {len(hosts)} hosts; {HOSTS_MAX} are the most.")
    if len(hosts) > 1 and not all(hosts):
        raise WrongAddress("A host is missing.")
    if len(ports) not in (1, len(hosts)):
        raise WrongAddress("It needs one port for each host, or one for all.")
    for port in ports:
        if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise WrongAddress(f"{WRONG_PORT} {ESCAPE}")
    return {**_defaults(hosts, target), **found}


def conninfo(url: str, **changed: str) -> str:
    """What psycopg connects by, for connections beside Django's."""
    return make_conninfo("", **{**parse(url), **changed})


def _defaults(hosts: list[str], target: str) -> dict[str, str]:
    several = {"target_session_attrs": target} if len(hosts) > 1 else {}
    seconds = _CONNECT_SECONDS_OF_SEVERAL if several else _CONNECT_SECONDS
    return {**several, **_NOTICE, "connect_timeout": str(seconds), "application_name": "tidegate"}


def _without_secrets(said: str, url: str) -> str:
    try:
        password = urlsplit(url).password or ""
    except ValueError:
        password = url
    is_secret = "://" in said or (password and password in said)
    return "it is malformed" if is_secret else said
