"""`python -m cluster_server.pod KIND --folder F … -- COMMAND`: see `runner`."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from cluster_server.pod.runner import KEY, Runner, RunnerSettings

KINDS = ("run", "compile", "execute")


def main() -> int:
    parsed = _parser().parse_args()
    settings = RunnerSettings(
        kind=parsed.kind,
        folder=parsed.folder,
        inputs=parsed.inputs,
        secrets=parsed.secrets,
        port=parsed.port,
        key=(parsed.secrets / KEY).read_text(),
        silent_seconds=parsed.silent_seconds,
        command=tuple(parsed.command),
        environment=dict(os.environ),
    )
    return asyncio.run(Runner(settings).run())


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="cluster_server.pod", description="Run a manager or a job in a pod."
    )
    made.add_argument("kind", choices=KINDS)
    made.add_argument("--folder", type=Path, required=True, help="its folder, which is made")
    made.add_argument("--inputs", type=Path, required=True, help="the mounted ConfigMap")
    made.add_argument("--secrets", type=Path, required=True, help="the mounted Secret")
    made.add_argument(
        "--port", type=int, default=7070, help="where the server and probes ask (default: 7070)"
    )
    made.add_argument(
        "--silent-seconds",
        type=float,
        default=60.0,
        help="after which a manager that does not answer is not live (default: 60)",
    )
    made.add_argument("command", nargs="+")
    return made
