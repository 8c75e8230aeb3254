"""A console in this process, with a PostgreSQL and a Redis of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from console.environment import PROJECT
from console.stack.embedded import embedded_servers


@contextlib.contextmanager
def own_console() -> Iterator[Path]:
    """Django is set up from here on. Gives a directory that is removed in the end."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        servers = stack.enter_context(embedded_servers(directory))
        os.environ |= {
            "DATABASE_URL": servers.database_url,
            "REDIS_URL": servers.redis_url,
            "TIDEGATE_SECRET_KEY": "-".join(["of-a-benchmark-and-good-for-nothing-else"] * 2),
            "TIDEGATE_MODE": "embedded",
            "TIDEGATE_STATIC_DIR": str(directory / "static"),
            "DJANGO_SETTINGS_MODULE": "console.settings",
        }
        subprocess.run([sys.executable, "manage.py", "migrate", "-v", "0"], cwd=PROJECT, check=True)
        import django

        django.setup()
        yield directory
