"""What the start of each process of the console takes of a processor, and what the stack takes at rest.

    make bench NAME=starts

`start.*`: from a new interpreter until all is loaded that comes before the process is ready; the
median, and the least. `start.api`: of a web process, until it has all pages and the API, too.
`rest.*`: the processes of a stack as `make up` starts it, with its demo and the demo's traffic, while
nobody looks at a page, as a share of one core; what has ended meanwhile counts for the process that had
begun it. It is processor time, which a busy machine makes longer, too, but by less.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from benchmarks.console import start, stop
from benchmarks.harness import Row, limited, options, progress, show
from benchmarks.own_console import settings
from console.environment import PROJECT

GOAL_MS: Final = 500.0
GOAL_PERCENT: Final = 15.0
_QUIET: Final = "import gc; gc.disable()\n"  # as each of them does while it loads
_OVER: Final = "\nimport os; os._exit(0)"  # to take apart what was loaded is no part of a start
_WORKER: Final = (
    "from console.celery import app; app.loader.import_default_modules(); app.loader.init_worker()"
)
_COMMAND: Final = "import console.manage, django; django.setup(); import django.core.management"
STARTS: Final = {
    "web": "import console.serve, console.asgi; console.asgi._settle_down()",
    "api": "import console.serve, console.asgi as a; a._settle_down(); a._load_the_rest()",
    "worker": f"import celery.bin.worker, celery.worker.worker; {_WORKER}",
    "orchestrator": f"{_COMMAND}; from console.workloads.management.commands import orchestrate",
    "beat": f"import celery.bin.beat, celery.apps.beat; {_WORKER}; import console.beat",
    "ingest": f"{_COMMAND}; from telemetry.management.commands import ingest",
}
LEAN: Final = ("beat", "ingest")
# Read by nobody: nothing connects while it is loaded.
_ENVIRONMENT: Final = settings("postgresql://nobody@127.0.0.1/none", "redis://127.0.0.1:1")


def start_rows(turns: int, static: Path) -> list[Row]:
    """All kinds take turns, so that a slow moment of the machine slows them all."""
    took: dict[str, list[float]] = {kind: [] for kind in STARTS}
    for turn in range(turns):
        progress(f"starts, turn {turn + 1} of {turns}")
        for kind, statement in STARTS.items():
            settings = "console.settings_lean" if kind in LEAN else "console.settings"
            before = _of_children()
            subprocess.run(
                [sys.executable, "-c", _QUIET + statement + _OVER],
                cwd=PROJECT,
                env={
                    **os.environ,
                    **_ENVIRONMENT,
                    "TIDEGATE_STATIC_DIR": str(static),
                    "DJANGO_SETTINGS_MODULE": settings,
                },
                check=True,
            )
            took[kind].append(1000 * (_of_children() - before))
    rows = []
    for kind, each in took.items():
        middle = statistics.median(each)
        more = {"least": min(each), "turns": float(turns)}
        rows.append(limited(f"start.{kind}", middle, "ms of CPU", GOAL_MS, more))
    return rows


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rest_rows(state: Path, settle_seconds: float, seconds: float) -> list[Row]:
    progress("a stack starts")
    process, *_ = start(state)
    try:
        progress("it settles")
        time.sleep(settle_seconds)
        progress("it rests")
        before = _used(process.pid)
        time.sleep(seconds)
        after = _used(process.pid)
    finally:
        stop(process)
    shares = {kind: 100 * used / seconds for kind, used in used_between(before, after).items()}
    total = sum(shares.values())
    return [
        limited("rest", total, "% of a core", GOAL_PERCENT),
        *(
            Row(f"rest.{kind}", share, "% of a core")
            for kind, share in sorted(shares.items(), key=lambda one: -one[1])
        ),
    ]


class Used(NamedTuple):
    """Seconds of a processor, with those of children that have ended."""

    kind: str
    parent: int
    seconds: float


def used_between(before: Mapping[int, Used], after: Mapping[int, Used]) -> dict[str, float]:
    """By kind. What has ended meanwhile is in its parent's seconds as a whole."""
    used: dict[str, float] = defaultdict(float)
    for pid, one in after.items():
        used[before.get(pid, one).kind] += one.seconds
    for pid, one in before.items():
        known = one if pid in after else before.get(one.parent, one)
        used[known.kind] -= one.seconds
    return dict(used)


def _used(root: int) -> dict[int, Used]:
    """Of a process and all below it."""
    found = {}
    for one in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds, command = sum(one.cpu_times()[:4]), []
            with contextlib.suppress(psutil.ZombieProcess):  # its parent has not seen its end yet
                command = one.cmdline()
            found[one.pid] = Used(_kind(command), one.ppid(), seconds)
    return found


def _kind(command: list[str]) -> str:
    """`worker` of Celery, `ingest` of Django's commands, the module of others."""
    line = " ".join(command)
    if line.startswith("postgres") or "/postgres " in line:
        return "postgres"
    if "redis-server" in line:
        return "redis"
    if "-m" not in command:
        return "other"
    module, *rest = command[command.index("-m") + 1 :]
    verbs = [one for one in rest if one in ("worker", "beat", "ingest", "rollup", "demo", "orchestrate")]
    return verbs[0] if verbs else module


def main() -> None:
    given = options(__doc__)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
        rows = start_rows(3 if given.quick else 9, Path(name) / "static")
        settle, seconds = (20.0, 20.0) if given.quick else (180.0, 60.0)
        rows += rest_rows(Path(name) / "state", settle, seconds)
    show("Starts and rest", rows, given.json)


if __name__ == "__main__":
    main()
