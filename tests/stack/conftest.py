"""Stacks for tests that start one."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.whole import Ended, Whole, whole_stack


@pytest.fixture
def own() -> Iterator[Whole]:
    """One for a test that ends it."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, whole_stack(Path(name)) as stack:
        yield stack


@pytest.fixture(scope="module")
def ended() -> Iterator[Ended]:
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, whole_stack(Path(name)) as stack:
        stack.up()
        password, pids = stack.password, stack.pids()
        stack.signal(signal.SIGINT)
        exit_code = stack.end()
        yield Ended(stack, stack.said, password, pids, exit_code)


@pytest.fixture
def again(ended: Ended, own: Whole) -> Whole:
    """One of a test's own that was up before: its data is a copy."""
    subprocess.run(["/bin/cp", "-a", ended.stack.state, own.state], check=True)  # owners as well
    return own
