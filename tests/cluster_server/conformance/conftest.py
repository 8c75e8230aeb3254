"""A world for each backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster_server.processes import cgroups
from tests.cluster_server.conformance.worlds import Processes, World
from tests.kubernetes.world import Kubernetes

KUBERNETES = pytest.param(
    "kubernetes",
    marks=[
        *(pytest.mark.slow, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")),
        pytest.mark.timeout(300),  # the first one makes the test bed
    ],
)


SPARES = {"processes": 0, "processes of spares": 2, "processes in control groups": 1}


@pytest.fixture(params=[*SPARES, KUBERNETES])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "kubernetes":
        # Only here: it takes a while, and can not be had everywhere.
        made: World = Kubernetes(
            request.getfixturevalue("kubernetes_bed"), has_jobs="job" in request.node.name
        )
    else:
        has_cgroups = request.param == "processes in control groups"
        made = _processes(tmp_path, has_cgroups=has_cgroups, spares=SPARES[request.param])
    await made.open()
    try:
        yield made
    finally:
        await made.close()


def _processes(tmp_path: Path, *, has_cgroups: bool, spares: int) -> World:
    if has_cgroups and cgroups.find(tmp_path / "state") is None:
        pytest.skip("control groups (v2) cannot be made here")
    return Processes(tmp_path / "state", has_cgroups=has_cgroups, spares=spares)
