"""What all commands have in common."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec

from console.environment import PROJECT
from telemetry import script


def test_every_command_and_package_of_ours_is_known() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    scripts = project["scripts"]
    assert sorted(script.SCRIPTS) == sorted(scripts)
    begun = [getattr(script, place.removeprefix("telemetry.script:")).args for place in scripts.values()]
    assert set(script.OURS) == {"telemetry", *(module.partition(".")[0] for module, _ in begun)}
    for module, extra in begun:
        assert find_spec(module), module
        assert extra in project["optional-dependencies"]
