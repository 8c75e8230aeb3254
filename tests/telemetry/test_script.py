"""What all commands have in common."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest

from console.environment import PROJECT
from telemetry import script

# Runs the module and its arguments, and sends itself a signal at the first import that takes time.
LOADING = """
import os, runpy, signal, sys
from telemetry import stop

_, number, module, *arguments = sys.argv
begun = {module.partition(".")[0], module, f"{module}.__main__"}
light = {"telemetry", *sys.stdlib_module_names}

class Teller:
    def find_spec(self, name, *_):
        if name not in begun and name.partition(".")[0] not in light:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Teller())
sys.argv[1:] = arguments
stop.FIRST = os.getpid()
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize(
    "command",
    [
        "cluster_server",
        "cluster_server.pod",
        "console.background worker",
        "console.ctl whoami",
        "console.manage prepare",
        "console.serve",
        "console.stack status",
        "inference_brain replay",
        "inference_brain serve",
        "kvss_agent",
        "swdriver_shim replay",
        "swdriver_shim serve",
        "workload_manager compile",
        "workload_manager run",
        "workload_manager.emulator",
    ],
)
def test_a_command_that_loads_ends_when_it_is_told_to(command: str, number: signal.Signals) -> None:
    """Also as the first process of a container, and without a traceback."""
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(int(number)), *command.split()],
        cwd=PROJECT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stderr) == (128 + number, "")


def test_every_command_and_package_of_ours_is_known() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    scripts = project["scripts"]
    assert sorted(script.SCRIPTS) == sorted(scripts)
    begun = [getattr(script, place.removeprefix("telemetry.script:")).args for place in scripts.values()]
    assert set(script.OURS) == {"telemetry", *(module.partition(".")[0] for module, _ in begun)}
    for module, extra in begun:
        assert find_spec(module), module
        assert extra in project["optional-dependencies"]
