"""Failed log-ins are counted by name and by address; whoever fails too often has to wait.

The counters live in PostgreSQL with everything else that must not be lost, and a counter is moved
by one statement, so that any number of web processes count together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection
from django.utils import timezone

from console.accounts.models import FailedLogin

PER_ADDRESS_FACTOR = 10  # many people may share an address


@dataclass(frozen=True)
class Limit:
    key: bytes
    count_max: int


def _limits(username: str, address: str | None) -> list[Limit]:
    per_name = settings.ENVIRONMENT.login_attempts_max
    limits = [Limit(_key("name", username.strip().lower()), per_name)]
    if address:
        limits.append(Limit(_key("address", address), per_name * PER_ADDRESS_FACTOR))
    return limits


def _key(kind: str, value: str) -> bytes:
    """A hash, because what is typed into the name field is now and then a password."""
    return hashlib.blake2b(
        f"{kind}:{value}".encode(), digest_size=32, key=settings.SECRET_KEY.encode()[:64]
    ).digest()


def wait_seconds(username: str, address: str | None) -> int:
    """How long until another attempt is looked at; 0 is now."""
    limits = {limit.key: limit.count_max for limit in _limits(username, address)}
    now = timezone.now()
    ends = [
        row.window_ends_at
        for row in FailedLogin.objects.filter(key_sha256__in=limits, window_ends_at__gt=now)
        if row.count >= limits[bytes(row.key_sha256)]
    ]
    return max((_seconds(end - now) for end in ends), default=0)


def count_failure(username: str, address: str | None) -> None:
    """One more failed attempt. A window that has ended begins anew."""
    now = timezone.now()
    ends_at = now + timedelta(seconds=settings.ENVIRONMENT.login_window_seconds)
    with connection.cursor() as cursor:
        for limit in _limits(username, address):
            cursor.execute(
                """
                INSERT INTO accounts_failedlogin AS f (key_sha256, window_ends_at, count)
                VALUES (%s, %s, 1)
                ON CONFLICT (key_sha256) DO UPDATE SET
                    count = CASE WHEN f.window_ends_at > %s THEN f.count + 1 ELSE 1 END,
                    window_ends_at = CASE WHEN f.window_ends_at > %s THEN f.window_ends_at
                                          ELSE EXCLUDED.window_ends_at END
                """,
                [limit.key, ends_at, now, now],
            )


def forget_failures(username: str) -> None:
    """After a successful log-in its name starts afresh. The address does not: it may be guessing."""
    FailedLogin.objects.filter(key_sha256=_key("name", username.strip().lower())).delete()


def drop_ended_windows(now: datetime) -> int:
    deleted, _ = FailedLogin.objects.filter(window_ends_at__lte=now).delete()
    return deleted


def _seconds(delta: timedelta) -> int:
    return max(1, -(-delta // timedelta(seconds=1)))
