"""Sessions of browsers as Django keeps them, in PostgreSQL, but for their keys: of those it has hashes.

The key is what the browser's cookie holds, and opens all that its user may do. Whoever reads the
database, or a backup of it, must not be able to show it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from django.contrib.sessions.backends import db
from django.contrib.sessions.base_session import AbstractBaseSession
from django.contrib.sessions.models import Session
from django.db import connection
from django.utils import timezone


class SessionStore(db.SessionStore):
    """Named as Django expects it of `SESSION_ENGINE`."""

    def exists(self, session_key: str) -> bool:
        return super().exists(_kept(session_key))

    def create_model_instance(self, data: dict[str, Any]) -> AbstractBaseSession:
        row = super().create_model_instance(data)
        row.session_key = _kept(row.session_key)
        return row

    def delete(self, session_key: str | None = None) -> None:
        if key := session_key or self.session_key:
            super().delete(_kept(key))

    def _get_session_from_db(self) -> Session | None:
        """Each request of a browser asks for it, which is why it does without Django's query builder."""
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT session_data FROM django_session WHERE session_key = %s AND expire_date > %s",
                [_kept(self.session_key or ""), timezone.now()],
            )
            row = cursor.fetchone()
        if row is None:
            self._session_key = None  # so that nobody chooses the key of a new one
            return None
        return Session(session_data=row[0])


def _kept(key: str) -> str:
    """As long as Django's column is. A key has 165 random bits, so a plain hash is enough."""
    return hashlib.sha256(key.encode()).hexdigest()[:40]
