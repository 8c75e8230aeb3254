"""A console in this process, with a PostgreSQL and a Redis of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from console.environment import PROJECT
from tests.embedded import Embedded, embedded_servers


def settings(database_url: str, redis_url: str) -> dict[str, str]:
    return {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "TIDEGATE_SECRET_KEY": "-".join(["of-a-benchmark-and-good-for-nothing-else"] * 2),
        "TIDEGATE_MODE": "embedded",
        "DJANGO_SETTINGS_MODULE": "console.settings",
    }


def set_up(servers: Embedded) -> None:
    """Django, and an empty database."""
    os.environ |= settings(servers.database_url, servers.redis_url)
    subprocess.run([sys.executable, "manage.py", "migrate", "-v", "0"], cwd=PROJECT, check=True)
    import django

    django.setup()


@contextlib.contextmanager
def own_console() -> Iterator[Path]:
    """Django is set up from here on. Gives a directory that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
        directory = Path(name)
        os.environ["TIDEGATE_STATIC_DIR"] = str(directory / "static")
        with embedded_servers(directory) as servers:
            set_up(servers)
            yield directory


def token() -> str:
    """Of a platform admin."""
    from console.accounts import tokens
    from console.accounts.principal import SYSTEM, Means
    from console.accounts.roles import Role
    from console.accounts.services import create_user, principal_for

    admin, _ = create_user(
        SYSTEM, username="bench", platform_role=Role.PLATFORM_ADMIN, must_change_password=False
    )
    _, text = tokens.issue(
        principal_for(admin, Means.BROWSER),
        name="bench",
        read_only=False,
        org=None,
        expires_at=datetime.now(UTC) + timedelta(days=1),
    )
    return text
