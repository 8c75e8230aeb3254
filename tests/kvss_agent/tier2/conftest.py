"""What the tests of tier 2 share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kvss_agent.compiled import STRICT, built


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The native mover; skipped where it cannot be built."""
    return built(tmp_path_factory.mktemp("native"), STRICT)
