"""The test bed on a control plane that somebody else has started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.requests import instance, workload
from tests.kubernetes.bed import Bed, bed
from tests.kubernetes.control_plane import ADMIN, ASSETS, BINARIES, Given, Own
from tests.kubernetes.resources import resource
from tests.kubernetes.world import Kubernetes

pytestmark = [
    *(pytest.mark.slow, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")),
    pytest.mark.timeout(300),  # the first one makes the test bed
]
LABEL = "box.tidegate.dev/box-chat-0-a"


@pytest.fixture(scope="module")
def theirs() -> Iterator[Own]:
    folder = Path(os.environ.get(ASSETS, ""))
    if not all((folder / name).exists() for name in BINARIES):
        pytest.skip(f"{ASSETS} names no folder with {', '.join(BINARIES)}")
    with tempfile.TemporaryDirectory(prefix="tidegate-theirs-") as directory:
        made = Own(Path(directory), folder, "127.0.0.1")
        try:
            made.start()
            if made.why_no_custom_resources:
                pytest.skip(made.why_no_custom_resources)
            yield made
        finally:
            made.stop()


async def test_workloads_run_on_a_cluster_that_is_given_and_nothing_is_left_of_them(theirs: Own) -> None:
    def given(folder: Path, _host: str) -> Given:
        return Given(folder, theirs.kubeconfig(ADMIN))

    with bed(given) as ours:
        ours.add_node("node-given", {LABEL: ""})
        await _run(ours)
    with theirs.client() as client:
        for kind in ("Node", "ClusterRoleBinding"):
            names = [one["metadata"]["name"] for one in client.list(resource(kind))]
            assert not [one for one in names if one in ("node-given", "tidegate-bed")]


async def _run(ours: Bed) -> None:
    """With just the rights of the manifests, by a runner and a job."""
    world = Kubernetes(ours, has_jobs=True)
    await world.open()
    try:
        await world.backend.apply(workload("chat", 1, instance("chat-0-a")))
        await world.until_state("chat", "chat-0-a", pb.READY)
        assert world.starts("chat-0-a") == 1
    finally:
        await world.close()
