"""Which Tidegate this is. No Django, and nothing but the standard library."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path


def tidegate_version() -> str:
    """Of the checkout that this is in, or else of what is installed."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return version("tidegate")
