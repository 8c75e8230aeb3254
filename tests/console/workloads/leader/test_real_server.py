"""The leader and a Cluster Server that runs processes and is killed: the goal is reached."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from django.conf import settings

from console.accounts.principal import SYSTEM
from console.workloads import changes
from console.workloads.leader.cluster import ClusterLink
from console.workloads.leader.election import Election
from console.workloads.leader.endpoints import EndpointWriter
from console.workloads.leader.orchestrator import Orchestrator
from console.workloads.models import Condition, Instance, Rollout, Workload
from tests.cluster_server.servers import ServerProcess
from tests.console.workloads.workloads import locked, make_workload, settle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPEC: dict[str, Any] = {
    "cache": {"enabled": False},
    "boxes_per_replica": 0,
    "rollout": {"ready_seconds": 0},
}


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder:
        command = shlex.join([sys.executable, str(Path(__file__).with_name("managers.py"))])
        made = ServerProcess(Path(folder), "--end-instances", "--command", command)
        made.start()
        yield made
        if not made.is_running:
            made.start()
        made.terminate()
        assert made.processes() == []


def test_a_workload_comes_up_is_restarted_and_goes_while_the_server_is_killed(
    server: ServerProcess, db: None
) -> None:
    orchestrator = Orchestrator(
        Election("real"),
        EndpointWriter(settings.REDIS_URL),
        lambda changed: ClusterLink(grpc.insecure_channel(server.target), changed),
    )

    def until(what: str, holds: Any, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, (
                what,
                list(Condition.objects.values_list("type", "status", "reason", "message")),
                list(Instance.objects.values("name", "state", "goal")),
            )
            orchestrator.round()
            settle()
            orchestrator.wait(0.05)

    def is_complete() -> bool:
        workload = Workload.objects.get()
        return (
            workload.stable_id == workload.revision_id
            and not Rollout.objects.filter(ended_at=None).exists()
        )

    make_workload(replicas=2, **SPEC)
    until("it runs", is_complete)
    changes.restart(SYSTEM, locked(SYSTEM))
    until("a new instance is decided", lambda: Instance.objects.count() == 3)
    server.kill()
    server.start()
    until("it is restarted", is_complete)
    assert Instance.objects.filter(ended_at=None).count() == 2
    changes.delete(SYSTEM, locked(SYSTEM))
    until("it is gone", lambda: not Workload.objects.exists())
    until("nothing runs", lambda: not server.processes())
    orchestrator.stop()
