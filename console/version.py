"""Which Tidegate this is. The project runs from its folder, so the version stands in pyproject.toml."""

from __future__ import annotations

import tomllib

from console.environment import PROJECT


def tidegate_version() -> str:
    return str(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"])
