"""An orchestrator whose rounds a test makes, and what tests ask about its workloads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis

from console.workloads.leader.cluster import ClusterLink
from console.workloads.leader.election import Election
from console.workloads.leader.endpoints import EndpointWriter
from console.workloads.leader.orchestrator import IDLE_SECONDS, Orchestrator
from console.workloads.models import Condition, Workload
from telemetry.decoder import decode
from telemetry.events import events_of
from telemetry.records import ENDPOINTS
from tests.console.workloads.leader.clusters import FakeCluster
from tests.console.workloads.workloads import settle

WITHOUT_CACHE: dict[str, Any] = {"cache": {"enabled": False}, "boxes_per_replica": 0}
QUICK: dict[str, Any] = {"rollout": {"ready_seconds": 0, "deadline_seconds": 60, "warm_seconds": 5}}
MOMENT_SECONDS = 0.02  # for news that are on their way


class Leader:
    """An orchestrator whose rounds a test makes, and whose clock it moves on."""

    def __init__(self, cluster: FakeCluster, redis_url: str) -> None:
        self.ahead = 0.0
        clock: Callable[[], float] = lambda: time.time() + self.ahead  # noqa: E731
        self.writer = EndpointWriter(redis_url, clock)
        self.orchestrator = Orchestrator(
            Election("test"),
            self.writer,
            lambda changed: ClusterLink(cluster.channel(), changed),
            clock,
        )

    def until(self, what: str, holds: Callable[[], object], seconds: float = 60.0) -> None:
        """Make rounds, half a second or more after each other by its clock, until this holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, (what, list(Condition.objects.values_list()))
            self.orchestrator.round()
            settle()
            self.orchestrator.wait(IDLE_SECONDS if self._waits_for_cluster() else MOMENT_SECONDS)
            self.ahead += 0.5

    def _waits_for_cluster(self) -> bool:
        """Whether there is an answer to come: a busy machine may take long for it, and deadlines of the
        leader's clock have to wait as well."""
        link = self.orchestrator._link
        return link is None or link.is_stale or bool(link._asked)


def told(redis_url: str, model: str = "example/chat-8b") -> dict[str, str]:
    """What brains read: addresses by replica."""
    with redis.Redis.from_url(redis_url) as client:
        raw: Any = client.get(ENDPOINTS + model)
    found = decode(raw, dict[str, Any])["endpoints"] if raw else []
    return {one["replica"]: one["url"] for one in found if one["state"] == "ready"}


def condition(kind: str) -> tuple[str, str]:
    row = Condition.objects.get(type=kind)
    return row.status, row.reason


def events(name: str) -> set[str]:
    return set(events_of(Workload.objects.get(name=name).topic).values_list("kind", flat=True))


def is_complete(name: str = "talk") -> bool:
    workload = Workload.objects.get(name=name)
    is_rolling = workload.rollouts.filter(ended_at=None).exists()
    return workload.stable_id == workload.revision_id and not is_rolling
