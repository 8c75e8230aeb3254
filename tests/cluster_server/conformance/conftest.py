"""A world for each backend. Kubernetes joins here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster_server.processes import cgroups
from tests.cluster_server.conformance.worlds import Processes, World


@pytest.fixture(params=["processes", "processes in control groups"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    has_cgroups = request.param != "processes"
    if has_cgroups and cgroups.find(tmp_path / "state") is None:
        pytest.skip("control groups (v2) cannot be made here")
    made = Processes(tmp_path / "state", has_cgroups=has_cgroups)
    await made.open()
    try:
        yield made
    finally:
        await made.close()
