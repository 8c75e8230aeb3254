"""What the tests of tier 2 share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kvss_agent.compiled import STRICT, built
from tests.prepared import directory_of_run


@pytest.fixture(scope="session")
def compiled() -> Any:
    """The native mover, compiled once for all workers; skipped where it cannot be built."""
    return built(directory_of_run("native"), STRICT)
