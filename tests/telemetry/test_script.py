"""What all commands have in common."""

from __future__ import annotations

import tomllib

from console.environment import PROJECT
from telemetry.script import OURS, SCRIPTS


def test_every_command_and_package_of_ours_is_known() -> None:
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
    assert sorted(SCRIPTS) == sorted(scripts)
    assert set(OURS) == {"telemetry", *(place.partition(".")[0] for place in scripts.values())}
