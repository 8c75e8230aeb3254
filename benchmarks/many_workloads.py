"""200 workloads (with `--quick` 40) of five replicas each: how fast they are listed, and what the leader
takes at rest.

The leader is a process as `make up` starts it, with a PostgreSQL and a Redis of its own. Its Cluster
Server speaks the real protocol, but its instances are rows that sleep: a thousand managers would be all
that two cores do. As a real one, it reports each workload every 20 s, for the age of what it knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks.children import cpu_percent, running
from benchmarks.harness import Row, limited, percentile, progress
from benchmarks.own_console import own_console
from telemetry.garbage import collect_less

if TYPE_CHECKING:
    from tests.console.workloads.leader.clusters import FakeCluster

WORKLOADS: Final = 200
WORKLOADS_QUICK: Final = 40
REPLICAS: Final = 5
LIST_MS: Final = 100.0
CPU_PERCENT: Final = 5.0
REPORT_SECONDS: Final = 20.0  # between two reports of one workload
UP_SECONDS: Final = 1200.0
PAGE: Final = "/api/v1/workloads?limit=200"
SPEC: Final[dict[str, Any]] = {
    "engine": {"kind": "emulator"},
    "replicas": REPLICAS,
    "boxes_per_replica": 0,
    "cache": {"enabled": False},
    "rollout": {"ready_seconds": 0},
}


def rows(*, quick: bool) -> list[Row]:
    count = WORKLOADS_QUICK if quick else WORKLOADS
    with own_console() as directory:
        from tests.console.workloads.leader.clusters import FakeCluster

        with FakeCluster(directory / "cluster.sock") as cluster, _leader(directory) as leader:
            progress(f"{count} workloads come up")
            began = time.monotonic()
            _create(count)
            _wait_until_all_are_ready(count)
            up = time.monotonic() - began
            with _reports(cluster):
                progress("the leader at rest")
                time.sleep(15.0)  # what follows from the last change
                # A whole round of looking at all of them, which it does every three minutes.
                percent = cpu_percent(leader, 30.0 if quick else 180.0)
        progress("lists")
        took, cpu = _lists(count, 20 if quick else 200)
    workloads = {"workloads": float(count), "replicas": float(count * REPLICAS)}
    p95, more = percentile(took, 0.95), {**workloads, "CPU ms": cpu}
    return [
        limited("workloads.list.p95", p95, "ms", LIST_MS, more),
        limited("workloads.leader_cpu", percent, "% of a core", CPU_PERCENT, workloads),
        Row("workloads.up", up, "s", more=workloads),
    ]


@contextmanager
def _leader(directory: Path) -> Iterator[psutil.Process]:
    url = f"unix:{directory}/cluster.sock"
    log = directory / "leader.log"
    with running(["manage.py", "orchestrate"], log, TIDEGATE_CLUSTER_URL=url) as leader:
        yield leader


def _create(count: int) -> None:
    from console.accounts.principal import SYSTEM
    from console.workloads import changes, spec

    for number in range(count):
        name = f"many-{number:03}"
        text = f"name: {name}\nmodel: example/{name}\ntokens_max: 32768\nengine: {{kind: emulator}}\n"
        changes.create(SYSTEM, spec.merged(spec.parse(text), SPEC))


def _wait_until_all_are_ready(count: int) -> None:
    from console.workloads.models import Condition, Rollout

    deadline = time.monotonic() + UP_SECONDS
    while True:
        ready = Condition.objects.filter(type="Ready", status="True").count()
        if ready == count and not Rollout.objects.filter(ended_at=None).exists():
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{ready} of {count} workloads were ready in {UP_SECONDS:g} s.")
        time.sleep(1.0)


@contextmanager
def _reports(cluster: FakeCluster) -> Iterator[None]:
    ends = threading.Event()
    names = sorted(cluster.workloads)

    def report() -> None:
        number = 0
        while not ends.wait(REPORT_SECONDS / len(names)):
            one = names[number % len(names)]
            cluster.say(next(iter(cluster.statuses(one))), running_requests=number)
            number += 1

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _lists(count: int, times: int) -> tuple[list[float], float]:
    """Milliseconds of requests for all workloads in this process, without a network, and of them those
    of a processor."""
    from django.test import Client

    from console.accounts.principal import SYSTEM
    from console.accounts.roles import Role
    from console.accounts.services import create_user

    who, _ = create_user(
        SYSTEM, username="reader", platform_role=Role.VIEWER, must_change_password=False
    )
    client = Client(headers={"host": "localhost"})
    client.force_login(who)
    collect_less()  # as the console does once it is ready
    took, cpu = [], 0.0
    for _ in range(times + 2):
        began, cpu_began = time.perf_counter(), time.thread_time()
        answer = client.get(PAGE)
        took.append(1e3 * (time.perf_counter() - began))
        cpu += 1e3 * (time.thread_time() - cpu_began)
        assert answer.status_code == 200, answer.content
        assert len(answer.json()["items"]) == count
    return took[2:], cpu / len(took)
