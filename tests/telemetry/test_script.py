"""What all commands have in common."""

from __future__ import annotations

import tomllib

from console.environment import PROJECT
from telemetry import script


def test_every_command_and_package_of_ours_is_known() -> None:
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
    assert sorted(script.SCRIPTS) == sorted(scripts)
    modules = {
        getattr(script, place.removeprefix("telemetry.script:")).args[0] for place in scripts.values()
    }
    assert set(script.OURS) == {"telemetry", *(module.partition(".")[0] for module in modules)}
