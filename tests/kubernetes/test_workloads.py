"""Workloads on a real API server, as people and clients meet them: from the console's API to an answer
of the brain."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.console.workloads.whole import MODEL
from tests.kubernetes.bed import Bed
from tests.kubernetes.control_plane import ADMIN
from tests.kubernetes.resources import resource
from tests.kubernetes.stack import Clients, InKubernetes, stack
from tests.live import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kubernetes,
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.timeout(900),
]
NAME = "chat"
ROLLED_OUT_SECONDS = 240.0


@pytest.fixture(scope="module")
def scene(kubernetes_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InKubernetes]:
    if kubernetes_bed.control.why_no_custom_resources:
        pytest.skip(kubernetes_bed.control.why_no_custom_resources)
    with stack(kubernetes_bed, tmp_path_factory.mktemp("k")) as made:
        made.create(NAME, replicas=2)
        made.wait_until_ready(NAME)
        made.wait_until_served()
        yield made


def test_a_rollout_fails_no_request(scene: InKubernetes) -> None:
    before = {one["name"] for one in scene.instances(NAME)}
    revision = scene.workload(NAME)["revision"] + 1
    with Clients(scene, MODEL) as clients:
        scene.patch(NAME, engine={"arguments": ["--start-seconds", "0.1"]})
        wait_until("it is rolled out", lambda: scene.rolled_out(NAME, revision), ROLLED_OUT_SECONDS)
        clients.go_on()
    assert clients.failed == []
    assert not before & {one["name"] for one in scene.instances(NAME)}


def test_a_node_is_drained_and_no_request_fails(scene: InKubernetes) -> None:
    """By `kubectl drain`: its instances are made anew elsewhere; requests go to the others meanwhile."""
    kubectl = scene.bed.control.kubectl
    if kubectl is None:
        pytest.skip("there is no kubectl")

    def run(*arguments: str) -> None:
        command = [str(kubectl), "--kubeconfig", str(scene.bed.kubeconfig(ADMIN)), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    drained = min(scene.nodes_of(NAME).values())
    moved = {one for one, node in scene.nodes_of(NAME).items() if node == drained}
    with Clients(scene, MODEL) as clients:
        try:
            only = ("--pod-selector", "app.kubernetes.io/name=tidegate-manager")
            run("drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", *only)
            wait_until(
                "all replicas run elsewhere",
                lambda: (
                    scene.is_ready(NAME)
                    and len(scene.instances(NAME)) == 2
                    and drained not in scene.nodes_of(NAME).values()
                ),
                ROLLED_OUT_SECONDS,
            )
            clients.go_on()
        finally:
            run("uncordon", drained)
    assert clients.failed == []
    assert not moved & {one["name"] for one in scene.instances(NAME)}


def test_a_workload_is_deleted_with_all_that_it_was(scene: InKubernetes) -> None:
    """Its wsjobs stay, as history."""
    scene.create("brief", model="example/brief")
    scene.wait_until_ready("brief")
    scene.delete("brief")

    def left() -> list[str]:
        with scene.bed.client() as client:
            return [
                f"{kind} {one['metadata']['name']}"
                for kind in ("Pod", "ConfigMap", "Secret", "Service")
                for one in client.list(resource(kind), namespace=scene.namespace)
                if "brief" in one["metadata"]["name"]
                and not one["metadata"]["name"].startswith("wsjob-")
            ]

    # Kubernetes collects what the removed one owned, in its own time.
    wait_until("nothing of it is left", lambda: not left())
