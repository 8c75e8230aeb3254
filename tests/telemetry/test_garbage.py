"""What processes load is not looked through for garbage."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

LOADED = """
import gc, runpy, sys
module, *sys.argv[1:] = sys.argv[1:]
looked = []
gc.callbacks.append(lambda phase, info: looked.append(phase))
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit:
    pass
print(gc.isenabled(), gc.get_freeze_count() > 10_000, len(looked) < 40)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["workload_manager", "spare"],
        ["workload_manager", "run", "--help"],
        ["workload_manager.emulator", "--help"],
        ["inference_brain", "serve", "--help"],
        ["swdriver_shim", "serve", "--help"],
    ],
    ids=" ".join,
)
def test_what_is_loaded_is_not_looked_through(command: list[str]) -> None:
    program = [sys.executable, "-c", LOADED, *command]
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("True True True\n"), done


RUN = """
import atexit, gc, runpy, sys
looks = lambda: (gc.isenabled(), gc.get_freeze_count() > 10_000, gc.get_threshold()[0] > 10_000)
atexit.register(lambda: print(*looks()))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_an_agent_looks_for_circles_seldom(tmp_path: Path) -> None:
    options = ["--state-dir", str(tmp_path), "--unix", str(tmp_path / "s"), "--control", "127.0.0.1:0"]
    program = [sys.executable, "-c", RUN, "kvss_agent", *options]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr
        assert any("Listening" in line for line in agent.stderr), agent.wait()
        agent.send_signal(signal.SIGTERM)
        assert agent.communicate()[0] == "True True True\n"
