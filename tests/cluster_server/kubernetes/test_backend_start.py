"""A backend that starts and stops on an API server that lacks something."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from cluster_server.kubernetes.backend import KubernetesBackend
from cluster_server.kubernetes.leader import NAME
from cluster_server.kubernetes.options import KubernetesOptions, LeaseTimes
from tests.cluster_server.kubernetes.api_server import NAMESPACE, ApiServer, kubeconfig

LEASE = LeaseTimes(renew_seconds=0.1)


def backend(server: ApiServer, folder: Path) -> KubernetesBackend:
    return KubernetesBackend(KubernetesOptions(NAMESPACE, kubeconfig(server, folder), lease=LEASE))


def holder(server: ApiServer) -> object:
    return server.objects["leases", NAME]["spec"]["holderIdentity"]


async def test_without_the_kind_wsjobs_it_says_so_and_leaves_the_lease(
    server: ApiServer, tmp_path: Path
) -> None:
    server.missing_kinds.add("wsjobs")
    made = backend(server, tmp_path)
    before = asyncio.all_tasks()
    with pytest.raises(OSError, match=r"knows no wsjobs: kubectl apply -f deploy/.*crd\.yaml"):
        await made.start()
    assert holder(server) == ""
    left = [task.get_name() for task in asyncio.all_tasks() - before]
    assert not [name for name in left if name.startswith(("watch", "lease"))]


async def test_it_stops_also_where_the_lease_cannot_be_released(
    server: ApiServer, tmp_path: Path
) -> None:
    made = backend(server, tmp_path)
    before = asyncio.all_tasks()
    await made.start()
    server.refusals["PUT", "leases"] = 403
    await made.stop()
    left = [task.get_name() for task in asyncio.all_tasks() - before]
    assert not [name for name in left if name.startswith(("watch", "lease", "publish", "services"))]


async def test_a_watch_that_ends_is_the_end_of_the_server(server: ApiServer, tmp_path: Path) -> None:
    made = backend(server, tmp_path)
    await made.start()
    server.garbles = True
    server.put("configmaps", "any", {})
    async with asyncio.timeout(60):
        await made.lost.wait()
    await made.stop()
    assert holder(server) == ""  # it still had it


async def started(server: ApiServer, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster_server", "--backend", "kubernetes"),
        *("--kubeconfig", str(kubeconfig(server, folder)), "--namespace", NAMESPACE),
        *("--listen", f"unix:{folder / 'c.sock'}"),
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_process_that_cannot_serve_leaves_the_lease(server: ApiServer, tmp_path: Path) -> None:
    server.put("configmaps", "tidegate-boxes", {"data": {"holders.json": "{"}})
    process = await started(server, tmp_path)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert process.returncode
    assert b"ConfigMap tidegate-boxes is damaged" in errors
    assert holder(server) == ""


async def test_a_process_that_waits_for_the_lease_ends_when_it_is_told_to(
    server: ApiServer, tmp_path: Path
) -> None:
    """In order, by a handler of its own: the first process of a container has to have one, or SIGTERM is
    not delivered."""
    leader = backend(server, tmp_path)
    await leader.start()
    process = await started(server, tmp_path)
    assert process.stderr
    async with asyncio.timeout(60):
        while b"Waiting for the Lease" not in await process.stderr.readline():
            pass
        process.terminate()
        assert await process.wait() == 0
    assert holder(server)
    await leader.stop()
