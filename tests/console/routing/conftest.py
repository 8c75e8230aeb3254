from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.routing.brains import FakeBrain, fake_brain, joined


@pytest.fixture
def brain(db: None, tmp_path: Path) -> Iterator[FakeBrain]:
    """One that has joined, and was told nothing yet."""
    with fake_brain(tmp_path / "brain") as running:
        joined(running)
        yield running
