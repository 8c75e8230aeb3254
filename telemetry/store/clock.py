"""The time by which what is stored is old."""

from __future__ import annotations

import time

from django.db import connection


def agreed_now() -> float:
    """Seconds since 1970, by the earlier of this machine's clock and PostgreSQL's. What one that is
    ahead has dropped is gone for good."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
        (found,) = cursor.fetchone()
    return min(time.time(), float(found))
