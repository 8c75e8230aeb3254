"""The watch of the Cluster Server, when it breaks off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from cluster_server.proto import cluster_pb2 as pb
from console.workloads.leader.cluster import ClusterLink
from tests.console.workloads.leader.clusters import FakeCluster
from tests.live import wait_until

pytestmark = pytest.mark.slow


class BreaksOff(FakeCluster):
    """Whose first snapshot breaks off in the middle, and which then has nothing new to say."""

    def __init__(self) -> None:
        super().__init__()
        self.watches = 0

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.Event]:  # noqa: N802
        self.watches += 1
        if self.watches == 1:
            one = pb.Workload(name="chat", generation=1)
            yield pb.Event(kind=pb.Event.SNAPSHOT, version=self.version, workload=one)
            context.abort(grpc.StatusCode.UNAVAILABLE, "The connection is cut.")
        while context.is_active() and request.since_version == self.version:
            time.sleep(0.05)
        yield from super().Watch(request, context)


def test_a_watch_that_breaks_off_is_heard_of_again_also_if_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a leader would think for good that nothing is known, and begin nothing."""
    monkeypatch.setattr("console.workloads.leader.cluster.STALE_SECONDS", 0.0)
    with FakeCluster() as cluster:
        link = ClusterLink(cluster.channel(), lambda _: None)
        link.open()
        try:
            wait_until("all of it is known", lambda: not link.is_stale)
            link._call.cancel()
            wait_until("it watches again", lambda: cluster.watches == 2)
            wait_until("it is known again", lambda: not link.is_stale)
        finally:
            link.close()


def test_a_snapshot_that_breaks_off_begins_again() -> None:
    with BreaksOff() as cluster:
        for name in ("chat", "talk"):
            cluster.workloads[name] = pb.Workload(name=name, generation=1)
        link = ClusterLink(cluster.channel(), lambda _: None)
        link.open()
        try:
            wait_until("all of it is known", lambda: not link.is_stale)
            assert link.names() == {"chat", "talk"}
        finally:
            link.close()
