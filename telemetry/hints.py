"""Telling at once that something changed. Only a hint: what it is has to be read, and who misses it
reads it anyway, a moment later.

PostgreSQL carries it, and so a hint is told exactly if, and when, the transaction that it belongs to is
committed; and no other server has to be there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from django.db import connection

CHANNEL: Final = "tidegate_live"
KIND_MAX: Final = 48
_SEPARATOR: Final = "\n"


def hint(topics: Iterable[str], kind: str) -> None:
    """Something of this kind has changed for these topics. The same told twice in a transaction is told
    once."""
    payloads = [f"{topic}{_SEPARATOR}{kind[:KIND_MAX]}" for topic in topics]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, unnest(%s::text[]))", [CHANNEL, payloads])


def read(payload: str) -> tuple[str, str]:
    """The topic and the kind of a hint."""
    topic, _, kind = payload.partition(_SEPARATOR)
    return topic, kind
