"""What processes load is not looked through for garbage."""

from __future__ import annotations

import subprocess
import sys

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
