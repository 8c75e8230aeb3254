"""Kubernetes as the conformance suite of backends sees it: a namespace of the test bed."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster_server.kubernetes import names
from cluster_server.kubernetes.backend import KubernetesBackend
from cluster_server.kubernetes.objects import CONTAINER
from cluster_server.kubernetes.options import KubernetesOptions, LeaseTimes
from cluster_server.processes.kernel import MARK
from tests.cluster_server.conformance.worlds import World
from tests.cluster_server.requests import FAKE_MANAGER
from tests.kubernetes import pods
from tests.kubernetes.server import RUNNER

if TYPE_CHECKING:
    from tests.kubernetes.bed import Bed

QUICK = LeaseTimes(lease_seconds=3.0, give_up_seconds=2.0, renew_seconds=0.3)


def options(bed: Bed, namespace: str) -> KubernetesOptions:
    return KubernetesOptions(
        namespace,
        bed.kubeconfig(),
        command=FAKE_MANAGER,
        runner=RUNNER,
        jobs_at_once=2,
        jobs_kept=5,
    )


class Kubernetes(World):
    """`backend` has just the rights of the manifests."""

    backend: KubernetesBackend

    def __init__(self, bed: Bed, *, has_jobs: bool = False) -> None:
        if has_jobs and bed.control.why_no_custom_resources:
            pytest.skip(bed.control.why_no_custom_resources)
        self.bed = bed
        self.namespace = f"test-{secrets.token_hex(4)}"
        bed.namespace(self.namespace)
        self.options = replace(options(bed, self.namespace), lease=LeaseTimes(renew_seconds=0.5))

    async def open(self) -> None:
        self.backend = KubernetesBackend(self.options)
        await self.backend.start()

    async def restart(self) -> None:
        await self.backend.stop()
        await self.open()

    def folders(self, name: str) -> list[pods.PodFolder]:
        nodes = self.bed.folder / "nodes"
        found = list(pods.folders(nodes, self.namespace, name))
        return found or list(pods.folders(nodes, self.namespace, names.job_pod(name)))

    def processes(self, name: str) -> list[int]:
        """Without its runner, which is no part of it."""
        return [
            pid
            for folder in self.folders(name)
            for pid in folder.processes(CONTAINER)
            if any(one.startswith(f"{MARK}=".encode()) for one in pods.environment(pid))
        ]

    def starts(self, name: str) -> int:
        return sum(len(_lines(work / "started")) for work in self._work(name))

    def write(self, name: str, file: str) -> None:
        (self._work(name)[0] / file).touch()

    def kill_manager(self, name: str) -> None:
        inside = int(_lines(self._work(name)[0] / "started")[-1])
        for pid in self.processes(name):
            if pods.number_inside(pid) == inside:
                os.kill(pid, 9)

    async def close(self) -> None:
        for workload in self.backend.workloads()[0]:
            if workload.generation:
                await self.backend.delete(workload.name)
        await self.backend.end_all(1)
        await self.backend.stop()
        self.bed.drop_namespace(self.namespace)

    def _work(self, name: str) -> list[Path]:
        return [work for folder in self.folders(name) for work in folder.volume("work").glob("*")]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
