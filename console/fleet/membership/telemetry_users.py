"""A Redis user for each agent, driver and brain that has joined, so that each can report numbers and a
cache map of itself only; and a second one for each brain, which reads endpoints.

Level-triggered: what is there is compared with what should be, so that a Redis that was emptied or
restarted, a process that joined anew with another token, and one that was removed all come right within
a round. Passwords follow from the processes' own tokens; Redis keeps their hashes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import redis
from django.conf import settings

from console.fleet.models import MODELS, ProcessKind, topic
from console.redis_client import connected
from telemetry.credentials import READER, rules, users
from telemetry.records import MAP_STREAM, OWN_STREAM, RECALL_STREAM
from telemetry.redis_clients import database
from telemetry.topics import kind_of
from telemetry.units import counted

log = logging.getLogger(__name__)
_STREAMS: Final = (OWN_STREAM, MAP_STREAM, RECALL_STREAM)  # of one process each

REDIS_SECONDS_MAX: Final = 5.0
USERS_AT_ONCE: Final = 200
_KINDS: Final = frozenset({*ProcessKind.values, READER})
_ORDERS: Final = frozenset({"reset"})  # what is done and not told again
_UNASKED: Final = frozenset({"sanitize-payload"})  # what Redis tells by itself
# Some versions tell commands back as categories. So what a server tells right after it was given rules
# is remembered, by user and rules.
_told_back: Final[dict[tuple[str, ...], set[str]]] = {}
_TOLD_BACK_MAX: Final = 20_000


def keep_users() -> int:
    """Make, change and remove users until each joined process has its own; how many that were."""
    url = settings.REGISTRAR_URL
    if not url:
        return 0
    theirs = settings.OWN_TELEMETRY_URL or url  # without it, taken to be the same
    with connected(url, REDIS_SECONDS_MAX) as client:
        return _apply(client, database(theirs))


def _wanted(in_database: int) -> Iterator[tuple[str, list[str]]]:
    for model in MODELS.values():
        joined = model.objects.exclude(joined_at=None).only("name", "control_token")
        for one in joined.iterator():
            if one.control_token:
                for user in users(topic(one)):
                    yield user, rules(user, one.control_token, in_database)


def _apply(client: redis.Redis, in_database: int) -> int:
    there = _there(client)  # first: whose user another worker makes from here on is wanted
    wanted = dict(_wanted(in_database))
    commands: list[tuple[str, ...]] = [
        ("ACL", "SETUSER", name, *its)
        for name, its in wanted.items()
        if not _is_as(name, there.get(name), its)
    ]
    for gone in sorted(there.keys() - wanted.keys()):
        commands.append(("ACL", "DELUSER", gone))
        commands.append(("UNLINK", *(f"{one}{gone}" for one in _STREAMS)))
    for start in range(0, len(commands), USERS_AT_ONCE):
        pipe: Any = client.pipeline(transaction=False)
        for command in commands[start : start + USERS_AT_ONCE]:
            pipe.execute_command(*command)
        pipe.execute()
    if commands:
        _remember(_there(client), wanted)
        log.info("Redis has users for %s now", counted(len(wanted), "process"))
    return len(commands)


def _there(client: redis.Redis) -> dict[str, set[str]]:
    """Users of processes, each with the words of its rules."""
    answer: Any = client.acl_list()
    found = {}
    for line in answer:
        words = (line.decode() if isinstance(line, bytes) else str(line)).split()
        if len(words) > 1 and kind_of(words[1]) in _KINDS:
            found[words[1]] = set(words[2:])
    return found


def _is_as(user: str, there: set[str] | None, its: list[str]) -> bool:
    """Whether the user may do just this: an older version may have made it, or somebody changed it."""
    if there is None:
        return False
    return there - _UNASKED == set(its) - _ORDERS or there == _told_back.get((user, *its))


def _remember(there: Mapping[str, set[str]], wanted: Mapping[str, list[str]]) -> None:
    if len(_told_back) > _TOLD_BACK_MAX:
        _told_back.clear()
    _told_back.update({(user, *its): there[user] for user, its in wanted.items() if user in there})
