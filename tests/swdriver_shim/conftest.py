"""Fixtures that several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swdriver_shim.adapters import remote
from tests.kvss_agent.plane import running
from tests.swdriver_shim.fleets import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running(tmp_path) as plane:
        made = Fleet(plane)
        made.make()
        yield made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine waits for its daemon's answers for as long as a busy machine takes."""
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 30.0)
