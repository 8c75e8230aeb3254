"""A real engine beside the stack, or a sentence why not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from console.environment import PROJECT
from console.stack import engines
from console.stack.errors import StackError
from console.stack.up import _settings

PYTHON = {engines.VLLM_PYTHON: "/opt/vllm/bin/python"}


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(engines, "INSTALLED", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"TIDEGATE_DEMO": "0", **PYTHON}, "TIDEGATE_DEMO"),
        ({"TIDEGATE_CLUSTER_URL": "unix:///run/cluster.sock", **PYTHON}, "TIDEGATE_CLUSTER_URL"),
        ({}, "make engines-environment"),
    ],
)
@pytest.mark.usefixtures("nothing_installed")
def test_it_is_refused_where_it_cannot_be_started(given: dict[str, str], named: str) -> None:
    """The demo is on unless somebody turns it off."""
    with pytest.raises(StackError, match=named):
        engines.check(given, _settings(given))


def test_the_environment_of_engines_is_found_unless_another_one_is_named(
    nothing_installed: Path,
) -> None:
    assert engines.environment({}) == {}
    (nothing_installed / ".engines-installed").touch()
    assert engines.environment({}) == {engines.VLLM_PYTHON: f"{nothing_installed}/bin/python"}
    assert engines.environment(PYTHON) == {}, "managers are told it anyway"
    given = {"TIDEGATE_DEMO": "1"}
    engines.check(given, _settings(given))


def test_an_engine_that_nobody_knows_is_refused_before_anything_is_installed() -> None:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        ["make", "up", "ENGINE=emulator"],  # noqa: S607
        cwd=PROJECT,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "ENGINE is “emulator”, but can only be vllm." in done.stderr
    assert not done.stdout
