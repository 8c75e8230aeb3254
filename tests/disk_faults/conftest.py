"""Disks that can be made to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk_faults.disks import Disks, compiled


@pytest.fixture(scope="session")
def interposer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("interposer"))


@pytest.fixture
def disks(interposer: Path, tmp_path: Path) -> Iterator[Disks]:
    made = Disks(interposer, tmp_path / "disk-faults")
    yield made
    made.heal()  # so that nobody hangs who is to end
