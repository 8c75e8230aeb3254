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
        key = _kept(self.session_key or "")
        try:
            return Session.objects.get(session_key=key, expire_date__gt=timezone.now())
        except Session.DoesNotExist:
            self._session_key = None  # so that nobody chooses the key of a new one
            return None


def _kept(key: str) -> str:
    """As long as Django's column is. A key has 165 random bits, so a plain hash is enough."""
    return hashlib.sha256(key.encode()).hexdigest()[:40]
