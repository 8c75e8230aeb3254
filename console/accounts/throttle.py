"""Log-ins that fail are counted by name and by address; whoever fails too often has to wait. Of an IPv6
address it is the /64, since whoever has one address there has them all.

The counters live in PostgreSQL with everything else that must not be lost, and a counter is moved
by one statement, so that any number of web processes count together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection
from django.db.models import F
from django.utils import timezone

from console.accounts.models import FailedLogin
from kvss_agent.limits.origins import origin_of

PER_ADDRESS_FACTOR = 10  # many people may share an address


@dataclass(frozen=True)
class Limit:
    key: bytes
    count_max: int


def _limits(username: str, address: str | None) -> list[Limit]:
    per_name = settings.ENVIRONMENT.login_attempts_max
    limits = [Limit(_key("name", username.strip().lower()), per_name)]
    if address:
        origin = origin_of(address)
        limits.append(Limit(_key("address", origin), per_name * PER_ADDRESS_FACTOR))
    return limits


def _key(kind: str, value: str) -> bytes:
    """A hash, because what is typed into the name field is now and then a password."""
    return hashlib.blake2b(
        f"{kind}:{value}".encode(), digest_size=32, key=settings.SECRET_KEY.encode()[:64]
    ).digest()


def count_attempt(username: str, address: str | None) -> int:
    """Count an attempt before it is looked at; the seconds until one is looked at again, 0 for now.

    Counting comes first, in one statement, so that attempts at the same time can't outrun the limit.
    A window that has ended begins anew. An attempt that has to wait prolongs nothing. The address comes
    first: one that has to wait makes no rows for further names.
    """
    now = timezone.now()
    ends_at = now + timedelta(seconds=settings.ENVIRONMENT.login_window_seconds)
    with connection.cursor() as cursor:
        for limit in reversed(_limits(username, address)):
            cursor.execute(
                """
                INSERT INTO accounts_failedlogin AS f (key_sha256, window_ends_at, count)
                VALUES (%s, %s, 1)
                ON CONFLICT (key_sha256) DO UPDATE SET
                    count = CASE WHEN f.window_ends_at > %s THEN f.count + 1 ELSE 1 END,
                    window_ends_at = CASE WHEN f.window_ends_at > %s THEN f.window_ends_at
                                          ELSE EXCLUDED.window_ends_at END
                RETURNING count, window_ends_at
                """,
                [limit.key, ends_at, now, now],
            )
            count, window_ends_at = cursor.fetchone()
            if count > limit.count_max:
                return _seconds(window_ends_at - now)
    return 0


def sentence(wait_seconds: int) -> str:
    return f"Too many failed attempts. Try again in {wait_seconds} seconds."


def forgive(username: str, address: str | None) -> None:
    """The attempt succeeded: its name starts afresh, and its address has one attempt less.

    Not more than that: whoever guesses many names may know the password of one.
    """
    name, *others = _limits(username, address)
    FailedLogin.objects.filter(key_sha256=name.key).delete()
    for limit in others:
        _take_back(limit)


def take_back(username: str, address: str | None) -> None:
    """The attempt was not looked at."""
    for limit in _limits(username, address):
        _take_back(limit)


def _take_back(limit: Limit) -> None:
    FailedLogin.objects.filter(key_sha256=limit.key, count__gt=0).update(count=F("count") - 1)


def drop_ended_windows(now: datetime) -> int:
    deleted, _ = FailedLogin.objects.filter(window_ends_at__lte=now).delete()
    return deleted


def _seconds(delta: timedelta) -> int:
    return max(1, -(-delta // timedelta(seconds=1)))
