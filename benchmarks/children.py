"""Processes that a benchmark starts, and what they take of a processor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from console.environment import PROJECT


def end(process: subprocess.Popen[Any], seconds_max: float) -> None:
    process.terminate()
    try:
        process.wait(seconds_max)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(
    words: Sequence[object], log: Path | None = None, **variables: str
) -> Iterator[psutil.Process]:
    """Python with these words, until the block ends. `log`: where it says what it has to say."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if log else None
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=PROJECT,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            end(process, 60)


def cpu_seconds(process: psutil.Process, *, with_children: bool = False) -> float:
    """That it has used until now."""
    total = 0.0
    for one in (process, *(process.children(recursive=True) if with_children else ())):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def cpu_percent(process: psutil.Process, seconds: float) -> float:
    """Of a core, in the seconds from now on."""
    before = cpu_seconds(process)
    time.sleep(seconds)
    return 100 * (cpu_seconds(process) - before) / seconds
