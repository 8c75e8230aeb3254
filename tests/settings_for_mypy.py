"""The settings as mypy's Django plugin reads them: it asks for types and connects to nothing."""

from __future__ import annotations

import os

os.environ.setdefault("DATABASE_URL", "postgresql://mypy@localhost/mypy")
os.environ.setdefault("REDIS_URL", "redis://localhost/0")
os.environ.setdefault("TIDEGATE_SECRET_KEY", "only-for-reading-types-and-never-for-signing-anything")
os.environ.setdefault("TIDEGATE_MODE", "embedded")

from console.settings import *  # noqa: F403
