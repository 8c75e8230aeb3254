"""Sessions as automation meets them: how fast a fleet's sessions are listed and planned, and what jobs
notice of a resize (`benchmarks.resizing`). For `benchmarks.placement`.

The console's part is asked in process, over a PostgreSQL of its own: 1,000 nodes, 512 boxes, 500
sessions of a box with a job each, 2,000 streams; what is planned is one more session of 4 boxes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

from benchmarks.harness import Row, limited, percentile
from benchmarks.own_console import own_console, token
from benchmarks.resizing import resize_rows
from kvss_agent.shard.arena import slot_bytes_for
from swdriver_shim.keys import COLUMN_TOKENS

STAMPS: Final = 16
NODES: Final = 1_000
BOXES: Final = 512
SESSIONS: Final = 500
GRANT_PERCENT: Final = 60  # of the fair share: a job of one group has few and large streams
LIST_MS, PLAN_MS = 100.0, 300.0  # what p95 should stay below
EACH: Final = 40 << 10  # bytes per token of a domain
MODEL: Final = {
    "name": "llama",
    "groups": [{"name": "full", "bytes_per_token": [EACH] * 4}],
}
SLOT_BYTES: Final = slot_bytes_for(EACH * COLUMN_TOKENS)


def session_rows(*, quick: bool) -> tuple[list[Row], str]:
    """The rows, and the hit rate over the story of a resize, drawn."""
    with own_console() as directory:
        rows, drawn = resize_rows(directory / "plane", requests=100 if quick else 1_000)
        forget()
        return rows + _api_rows(20 if quick else 100), drawn


def _api_rows(times: int) -> list[Row]:
    from django.test import Client

    _fill()
    client = Client(SERVER_NAME="localhost", headers={"authorization": f"Bearer {token()}"})

    def listed() -> None:
        assert client.get("/api/v1/sessions?limit=200").status_code == 200

    def planned() -> None:
        answer = client.post(
            "/api/v1/sessions?validate_only=true",
            {"name": "one-more", "boxes": 4, "bytes_per_token": 640 << 10},
            content_type="application/json",
            headers={"Idempotency-Key": "plan"},
        )
        assert answer.status_code == 200, answer.content

    return [
        _timed("api.list.p95", listed, times, LIST_MS, {"sessions": SESSIONS}),
        _timed("api.plan.p95", planned, times, PLAN_MS, {"nodes": NODES, "streams": 4 * SESSIONS}),
    ]


def _timed(
    name: str, call: Callable[[], None], times: int, goal_ms: float, more: dict[str, float]
) -> Row:
    call()  # imports, connections, caches
    gc.collect()
    gc.freeze()  # as a web process does when it begins
    took, cpu = [], []
    for _ in range(times):
        began, began_cpu = time.perf_counter(), time.process_time()
        call()
        took.append(1000 * (time.perf_counter() - began))
        cpu.append(1000 * (time.process_time() - began_cpu))
    p95 = percentile(took, 0.95)
    more = {"p50": percentile(took, 0.5), "CPU ms": percentile(cpu, 0.5), **more}
    return limited(name, p95, "ms", goal_ms, more)


def _fill() -> None:
    """The fleet, and sessions with a box and a job each, whose shards are where they were planned."""
    from console.fleet.models import Box, Node
    from console.fleet.services import topology
    from console.placement import grants
    from console.placement.planner import plan
    from console.sessions.models import Job, JobBox, RuleSet, Session, SessionBox, Stream
    from console.sessions.plans.model import model_of
    from console.sessions.plans.snapshot import job_of
    from tests.console.sessions.fleets import make_box, make_driver, make_node

    for number in range(NODES):
        stamp, place = number % STAMPS, number // STAMPS
        leaves = [f"l{stamp}-{place % 4}", f"l{stamp}-{(place + 1) % 4}"]
        make_node(f"ax{number:04}", *leaves, memory_bytes=1 << 40, shards_max=6)
    for number in range(BOXES):
        make_box(f"cs{number:03}", [f"l{number % STAMPS}-{place}" for place in range(4)])
    rules = RuleSet.objects.create(grant_percent=GRANT_PERCENT).rules()
    nodes = {node.name: node for node in Node.objects.all()}
    fleet, wanted, jobs = topology(), [], {}
    for number, box in enumerate(Box.objects.order_by("name")[:SESSIONS]):
        session = Session.objects.create(
            name=f"s{number}", boxes_desired=1, boxes_min=1, boxes_increment=1
        )
        on = SessionBox.objects.create(session=session, box=box, ready=True)
        driver = make_driver(f"job{number}", MODEL)
        job = Job.objects.create(session=session, name="serve", driver=driver, running=True)
        JobBox.objects.create(job=job, session_box=on)
        jobs[session.name] = job, box
        placed = job_of(fleet, job.name, model_of(driver), [box.name])
        wanted.append(grants.Session(session.name, (placed,), rules))
    found = plan(fleet, grants.streams(fleet, wanted))
    assert not found.unplaced
    Stream.objects.bulk_create(
        Stream(
            job=jobs[one.stream.session][0],
            group="full",
            index=one.stream.domain,
            box=jobs[one.stream.session][1],
            domain=one.stream.domain,
            wio=one.stream.wio,
            slot_bytes=SLOT_BYTES,
            node=nodes[one.node],
            slots=one.stream.memory_bytes // SLOT_BYTES,
            tier=int(one.tier),
            port_leaf=one.route.port_leaf,
            nic_leaf=one.route.nic_leaf,
        )
        for one in found.placed
    )


def forget() -> None:
    """What the resize needed is no part of the large fleet."""
    from console.fleet.models import Box, Driver, Leaf, Nic, Node, Port
    from console.operations.models import Operation
    from console.sessions.models import JobBox, Session, SessionBox, Stream

    for model in (Stream, JobBox, SessionBox, Session, Operation, Driver, Nic, Node, Port, Box, Leaf):
        model.objects.all().delete()
