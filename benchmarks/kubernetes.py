"""The backend `kubernetes` on a real API server.

    KUBEBUILDER_ASSETS=/opt/kubernetes make bench NAME=kubernetes

A control plane with two nodes, whose kubelet is the tests' stand-in; in front of it a whole stack as
`make up` starts it, and a brain. `create.first_ready` is the time from `POST /workloads` until the
workload is ready, of a spec that is compiled first. `rollout.failed` counts requests of clients that ask
all the while. `server_cpu` is what a Cluster Server takes of a core while 200 workloads are at rest: its
pods are sentences, but it watches and asks as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil

from benchmarks.children import cpu_percent
from benchmarks.harness import Row, limited, options, percentile, progress, show
from cluster_server.client import ClusterClient
from cluster_server.proto import cluster_pb2 as pb
from tests.console.workloads.whole import MODEL
from tests.kubernetes.bed import Bed, bed, why_not
from tests.kubernetes.hollow import hollow_node
from tests.kubernetes.server import server
from tests.kubernetes.stack import Clients, InKubernetes, stack
from tests.live import wait_until

FIRST_READY_SECONDS: Final = 5.0
CPU_PERCENT: Final = 5.0
WORKLOADS: Final = 200
UP_SECONDS: Final = 600.0
SETTLE_SECONDS: Final = 30.0


def create_row(scene: InKubernetes, times: int) -> Row:
    took = []
    for number in range(times):
        progress(f"create {number + 1} of {times}")
        name = f"fresh-{number}"
        began = time.monotonic()
        # Another spec each time, so that it is compiled.
        emulator = {"parameters": 1e9 + number}
        scene.create(name, model=f"example/{name}", engine={"kind": "emulator", "emulator": emulator})
        scene.wait_until_ready(name)
        took.append(time.monotonic() - began)
        scene.delete(name)
    name, more = "kubernetes.create.first_ready.p50", {"max ms": 1e3 * max(took), "times": float(times)}
    return limited(name, percentile(took, 0.5), "s", FIRST_READY_SECONDS, more)


def rollout_row(scene: InKubernetes, times: int) -> Row:
    scene.create("chat", replicas=2)
    scene.wait_until_ready("chat")
    scene.wait_until_served()
    failed, answered = [], 0
    for number in range(times):
        progress(f"roll-out {number + 1} of {times}")
        revision = scene.workload("chat")["revision"] + 1
        with Clients(scene, MODEL) as clients:
            scene.patch("chat", engine={"arguments": ["--start-seconds", f"0.{number + 1}"]})
            wait_until(
                "it is rolled out",
                lambda: scene.rolled_out("chat", revision),  # noqa: B023 - called before the next round
                UP_SECONDS,
            )
            clients.go_on()
        failed += clients.failed
        answered += clients.answered
    for failure in failed[:3]:
        sys.stderr.write(f"{failure}\n")
    more = {"requests": float(answered + len(failed)), "times": float(times)}
    return limited("kubernetes.rollout.failed", len(failed), "requests", 0.0, more)


def rest_row(bed: Bed, directory: Path, workloads: int, seconds: float) -> Row:
    namespace = f"rest-{secrets.token_hex(4)}"
    bed.namespace(namespace)
    listens = f"unix:{directory / 'rest.sock'}"
    with (
        hollow_node(bed),
        server(bed, namespace, directory, "--listen", listens) as process,
    ):
        progress(f"{workloads} workloads come up")
        asyncio.run(_until_all_are_ready(listens, workloads))
        progress("the Cluster Server at rest")
        time.sleep(SETTLE_SECONDS)
        percent = cpu_percent(psutil.Process(process.pid), seconds)
    more = {"workloads": float(workloads)}
    return limited("kubernetes.server_cpu", percent, "% of a core", CPU_PERCENT, more)


async def _until_all_are_ready(target: str, count: int) -> None:
    async with ClusterClient(target) as cluster, asyncio.timeout(UP_SECONDS):
        for number in range(count):
            name = f"many-{number:03}"
            one = pb.Instance(name=f"{name}-0-a", spec=b"{}", goal=pb.RUN, grace_seconds=1)
            await cluster.apply(name, 1, [one])
        ready: set[str] = set()
        async with contextlib.aclosing(cluster.watch()) as events:
            async for event in events:
                states = [one.state for one in event.workload.instances]
                if states == [pb.READY]:
                    ready.add(event.workload.name)
                if len(ready) == count:
                    return


def main() -> None:
    given = options(__doc__)
    if reason := why_not():
        sys.exit(f"There is no Kubernetes to measure: {reason}.")
    rows = []
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as directory:
        with bed() as made:
            if made.control.why_no_custom_resources:
                sys.exit(f"Workloads can't be compiled: {made.control.why_no_custom_resources}.")
            for name in ("node-a", "node-b"):
                made.add_node(name)
            progress("a whole stack")
            with stack(made, Path(directory)) as scene:
                rows.append(create_row(scene, 3 if given.quick else 10))
                rows.append(rollout_row(scene, 1 if given.quick else 3))
        with bed() as made:
            workloads = 40 if given.quick else WORKLOADS
            rows.append(rest_row(made, Path(directory), workloads, 30.0 if given.quick else 180.0))
    show("Kubernetes", rows, given.json)


if __name__ == "__main__":
    main()
