"""A node that runs nothing: each of its pods is said to run and to be ready, and one runner answers for
all of them. So there are hundreds of pods on a small machine; what watches and asks them is real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.types import PatchType

from cluster_server.kubernetes.objects import RUNNER_PORT
from cluster_server.pod.runner import Asked, Report
from cluster_server.processes.manager_status import ManagerStatus
from tests.console.sessions.network import ip
from tests.kubernetes.bed import Bed
from tests.kubernetes.control_plane import ADMIN
from tests.kubernetes.kubelet import now
from tests.kubernetes.resources import resource

NAME: Final = "hollow"
SUBNET: Final = 200  # of the network of the bed, of which kubelets have the first few
LEASE_SECONDS: Final = 1.0
VERSION: Final = 1
PODS: Final = "1000"
CONDITIONS: Final = ("Initialized", "Ready", "ContainersReady", "PodScheduled")


@contextlib.contextmanager
def hollow_node(bed: Bed) -> Iterator[None]:
    """For all pods of a bed that has no other."""
    addresses = f"{bed.network}.{SUBNET}.0/22"
    ip("route", "add", "local", addresses, "dev", "lo")
    node = HollowNode(bed)
    thread = threading.Thread(target=lambda: asyncio.run(node.run()))
    thread.start()
    try:
        bed.until_ready(NAME)
        yield
    finally:
        node.stop()
        thread.join()
        ip("route", "delete", "local", addresses, "dev", "lo")


class HollowNode:
    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._numbers = itertools.count(1)
        self._began = time.time()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = asyncio.Event()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = KubeConfig.from_file(self._bed.kubeconfig(ADMIN))
        self._client = AsyncClient(config, trust_env=False, field_manager="hollow")
        await self._register()
        # On all addresses: those of all pods are this machine's.
        server = await asyncio.start_server(self._answer, "0.0.0.0", RUNNER_PORT)  # noqa: S104
        tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._follow())]
        await self._ends.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def stop(self) -> None:
        if self._loop:
            self._loop.call_soon_threadsafe(self._ends.set)

    async def _register(self) -> None:
        have = {"cpu": PODS, "memory": "1000Gi", "pods": PODS}
        condition = {"type": "Ready", "status": "True", "reason": "Hollow", "lastHeartbeatTime": now()}
        status = {"capacity": have, "allocatable": have, "conditions": [condition]}
        node: Any = resource("Node")
        await self._client.create(node({"metadata": {"name": NAME}, "spec": {}}))
        await self._client.patch(node.Status, NAME, {"status": status}, patch_type=PatchType.STRATEGIC)

    async def _renew(self) -> None:
        """The Lease says that the node is alive."""
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NAME}}
        while True:
            spec = {
                "holderIdentity": NAME,
                "leaseDurationSeconds": 40,
                "renewTime": now().replace("Z", ".000000Z"),
            }
            await self._client.patch(
                resource("Lease"),
                NAME,
                {**lease, "spec": spec},
                namespace="kube-node-lease",
                patch_type=PatchType.APPLY,
                force=True,
            )
            await asyncio.sleep(LEASE_SECONDS)

    async def _follow(self) -> None:
        """Each pod runs as soon as it is bound, and is gone as soon as it is to be."""
        pods: Any = resource("Pod")
        async for _, pod in self._client.watch(pods, namespace="*"):
            metadata = pod["metadata"]
            name, space = metadata["name"], metadata["namespace"]
            if pod["spec"].get("nodeName") != NAME:
                continue
            with contextlib.suppress(ApiError):  # it is gone meanwhile
                if "deletionTimestamp" in metadata:
                    await self._client.delete(pods, name, namespace=space, grace_period=0)
                elif not pod.get("status", {}).get("podIP"):
                    status = {"status": self._status(pod)}
                    await self._client.patch(pods.Status, name, status, namespace=space)

    def _status(self, pod: Any) -> dict[str, Any]:
        number = next(self._numbers)
        address = f"{self._bed.network}.{SUBNET + number // 256}.{number % 256}"
        runs = {"ready": True, "restartCount": 0, "state": {"running": {"startedAt": now()}}}
        return {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": now(),
            "conditions": [{"type": one, "status": "True"} for one in CONDITIONS],
            "containerStatuses": [
                {"name": one["name"], "image": one["image"], "imageID": "", **runs}
                for one in pod["spec"]["containers"]
            ],
        }

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As the runner of a pod whose manager is ready, and has no news."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length:")[2].split()[0])
            asked = msgspec.json.decode(await reader.readexactly(length), type=Asked)
            if asked.after >= VERSION:
                await asyncio.sleep(asked.wait)
            url = f"http://{writer.get_extra_info('sockname')[0]}:8000"
            manager = ManagerStatus("ready", version=1, since=self._began, url=url)
            told = Report(VERSION, manager=manager)
            body = msgspec.json.encode(told)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
        writer.close()
