"""Ingest and rollup as processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from console.environment import PROJECT
from tests.live import LiveConsole


@contextlib.contextmanager
def ingest_of(console: LiveConsole, log: Path) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "ingest"],
            cwd=PROJECT,
            env=console.environment,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()
