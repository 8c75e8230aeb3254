"""Stacks for tests that start one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.whole import Whole, prepared_stack, whole_stack


@pytest.fixture
def own() -> Iterator[Whole]:
    """One for a test that ends it."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, whole_stack(Path(name)) as stack:
        yield stack


@pytest.fixture
def again() -> Iterator[Whole]:
    """One of a test's own that was up before: its data is a copy."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, prepared_stack(Path(name)) as stack:
        yield stack
