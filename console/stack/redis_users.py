"""Users of Redis by role: what each may do, and nothing else. The same under `make up` and in
production, whose files in `deploy/redis/` are written from here.

Two servers: one is the broker of work, the other takes telemetry. Whoever may add telemetry can neither
reach work nor fill the memory that it lies in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from telemetry.credentials import CONSOLE, SHARED
from telemetry.records import (
    ENDPOINTS_BEFORE,
    ENDPOINTS_CHANNEL,
    MAP_STREAM,
    OWN_STREAM,
    RECALL_STREAM,
    SHAPE_KEY,
    STREAM,
)

BROKER_KEYS: Final = "tidegate:celery:*"


@dataclass(frozen=True)
class User:
    """One role: what it is for, the keys and channels that it reaches, and its commands."""

    name: str
    purpose: str
    rules: tuple[str, ...]

    def line(self, password_rule: str) -> str:
        """As redis.conf and an ACL file have it."""
        return f"user {self.name} on {password_rule} resetchannels {' '.join(self.rules)}"


# Of the server that REDIS_URL names
BROKER: Final = (
    User(
        "broker",
        "web, worker, beat: they ask for work and do it",
        (
            f"~{BROKER_KEYS}",
            f"&{BROKER_KEYS}",
            *("-@all", "+@read", "+@write", "+@transaction", "+@connection"),
            *(
                "-@dangerous",
                "-@admin",
                "+eval",
                "+evalsha",
                "+script|load",
                "+script|exists",
                "+info",
                "+time",
                "+publish",
            ),
        ),
    ),
    User("observer", "ingest and rollup: whether it is there", ("-@all", "+info", "+ping")),
)
# Of the server that TIDEGATE_TELEMETRY_URL and its siblings name
TELEMETRY: Final = (
    User(
        CONSOLE,
        "processes of the console: they tell their own numbers",
        (f"~{OWN_STREAM}{CONSOLE}", "-@all", "+xadd", "+ping"),
    ),
    User(
        "ingest",
        "ingest: it reads all streams and takes out what is written",
        (
            *(f"~{STREAM}", f"~{OWN_STREAM}*", f"~{SHAPE_KEY}*", "-@all", "+ping"),
            *("+scan", "+xreadgroup", "+xautoclaim", "+xpending", "+xack", "+xdel", "+xlen"),
            *("+xtrim", "+xgroup|create", "+xgroup|delconsumer", "+xinfo|consumers", "+mget"),
        ),
    ),
    User(
        "observer",
        "web: how many records wait",
        (f"~{STREAM}", f"~{OWN_STREAM}*", "-@all", "+scan", "+xlen", "+info", "+ping"),
    ),
    User(
        "leader",
        "orchestrators: the leader writes where replicas of workloads are",
        (
            *(f"~{ENDPOINTS_BEFORE}*", f"&{ENDPOINTS_CHANNEL}", "-@all", "+ping"),
            *("+get", "+mget", "+set", "+del", "+publish", "+eval", "+evalsha"),
        ),
    ),
    User(
        "registrar",
        "worker: it makes the users of processes that have joined, and removes them",
        (
            *(f"~{OWN_STREAM}*", f"~{MAP_STREAM}*", f"~{RECALL_STREAM}*"),
            *("-@all", "+ping", "+unlink"),
            *("+acl|setuser", "+acl|deluser", "+acl|list"),
        ),
    ),
)
# Of each server that has a replica and Sentinels
REPLICATION: Final = (
    User(
        "replica",
        "the other servers of the group: they follow the primary",
        ("-@all", "+psync", "+replconf", "+ping"),
    ),
    User(
        "sentinel",
        "Sentinels: they watch, and make another server the primary",
        (
            *("&__sentinel__:hello", "-@all", "+ping", "+multi", "+exec", "+slaveof", "+role"),
            *("+info", "+subscribe", "+publish", "+config|rewrite", "+client|setname"),
            *("+client|kill", "+script|kill"),
        ),
    ),
)
# Where agents and drivers have no users of their own: of earlier versions, or in an engine's process.
OF_EARLIER_VERSIONS: Final = User(
    SHARED,
    "agents and drivers of earlier versions, and drivers in an engine's process: all of them together",
    (f"~{STREAM}", f"~{SHAPE_KEY}*", "-@all", "+xadd", "+set", "+multi", "+exec", "+ping"),
)


def lines(users: tuple[User, ...], passwords: Mapping[str, str]) -> list[str]:
    """For redis.conf, which has hashes of the passwords only."""
    return [user.line(f"#{hashlib.sha256(passwords[user.name].encode()).hexdigest()}") for user in users]


def acl_file(users: tuple[User, ...]) -> str:
    """For an operator, who puts passwords in."""
    text = [
        "# Users of this Redis. Written by `make docs` from console/stack/redis_users.py.",
        "# Put a long password in the place of each PASSWORD_…, and these lines into redis.conf itself:",
        "# when Redis writes that anew, it would have users of an included file twice.",
        "# Where addresses name a database that is not the first, as …:6379/1, the users in them need",
        "# `+select|1` as well; broker has it, replica and sentinel are in none.",
        "user default off",
    ]
    for user in users:
        text += [f"# {user.name}: {user.purpose}", user.line(f">PASSWORD_{user.name.upper()}")]
    return "\n".join(text) + "\n"


FILES: Final = {
    "broker.acl": (*BROKER, *REPLICATION),
    "telemetry.acl": (*TELEMETRY, OF_EARLIER_VERSIONS, *REPLICATION),
}
