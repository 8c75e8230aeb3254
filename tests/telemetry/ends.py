"""Ingest and rollup as processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.live import LiveConsole
from tests.processes import start


def own_choice(environment: Mapping[str, str]) -> dict[str, str]:
    """For a process that chooses its settings itself."""
    return {name: value for name, value in environment.items() if name != "DJANGO_SETTINGS_MODULE"}


@contextlib.contextmanager
def ingest_of(console: LiveConsole, log: Path) -> Iterator[None]:
    with log.open("w") as output:
        process = start(
            *("console.manage", "ingest"),
            environment=own_choice(console.environment),
            descriptors={1: output.fileno(), 2: output.fileno()},
        )
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
