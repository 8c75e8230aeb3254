"""The commands of an installed Tidegate. Nothing but the standard library: without the extra of a
command nothing else is there."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from telemetry.stop import end_as_first_process

SCRIPTS: Final = (
    "cluster-server",
    "inference-brain",
    "kvss-agent",
    "swdriver",
    "tidegate",
    "tidegatectl",
    "workload-manager",
)
OURS: Final = (
    "cluster_server",
    "console",
    "inference_brain",
    "kvss_agent",
    "swdriver_shim",
    "telemetry",
    "workload_manager",
)


def begin(main: Callable[[], int]) -> int:
    """Run this process. Until `main` handles signals itself, Ctrl-C ends it without a traceback, and
    SIGTERM also where it is the first process of a container. So `main` imports what takes time."""
    end_as_first_process()
    try:
        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run(module: str, extra: str) -> int:
    """Run `main` of the module. Without the extra that it needs, say so in a sentence."""
    try:
        return begin(lambda: int(importlib.import_module(module).main()))
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing in OURS:
            raise
        sys.stderr.write(
            f"{missing} is not installed. This command needs the extra `{extra}`: "
            f"pip install 'tidegate[{extra}]'\n"
        )
        return os.EX_UNAVAILABLE


cluster_server = partial(run, "cluster_server.serve", "cluster")
inference_brain = partial(run, "inference_brain.__main__", "brain")
kvss_agent = partial(run, "kvss_agent.serve", "agent")
swdriver = partial(run, "swdriver_shim.__main__", "driver")
tidegate = partial(run, "console.stack.command_line", "console")
tidegatectl = partial(run, "console.ctl.command", "ctl")
workload_manager = partial(run, "workload_manager.__main__", "manager")


def program(module: str) -> str:
    """What a usage calls this program: the command that was started, or Python with its module."""
    name = Path(sys.argv[0]).name
    return name if name in SCRIPTS else f"python -m {module}"


def add_verb(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A parser below the verbs of another one, with the same text in the list and in its own help."""
    made: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[:1].upper()}{text[1:]}."
    )
    return made
