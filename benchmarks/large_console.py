"""A large console, as rows: 1,000 nodes, 200 orgs, 500 sessions, and what happened to them in 30 days.

For benchmarks of what people look at. Written as it lies in the database: who made it that way, and how
long that takes, is measured elsewhere.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import product
from typing import Any, Final

from django.db import connection
from django.utils import timezone

from benchmarks.telemetry import learn_topics
from console.accounts.roles import Role
from console.alerts.models import Alert, Channel, Notification, Silence, Transition
from console.alerts.state.transitions import fingerprint
from console.audit.models import AuditEntry
from console.control.models import Target
from console.fleet.models import Box, Brain, Domain, Driver, Leaf, Nic, Node, Port, SpineLink, Stamp
from console.metrics.catalog import METRICS
from console.operations.models import Operation
from console.orgs.models import Org
from console.placement.topology import State, Tier
from console.policies.models import Caller, PolicyInForce, PolicyVersion
from console.routing.models import Replica, ServedModel
from console.sessions.models import DriverOrg, Job, JobBox, Session, SessionBox, Stream
from console.workloads.models import Bucket, Instance
from telemetry.cells import Cells
from telemetry.metrics import Kind, Metric
from telemetry.models import Event
from telemetry.shapes import Series, Shape
from telemetry.store.storage import LEVELS, Names, Stored, copy_in, day_of, encoded, make_days
from telemetry.topics import FLEET
from tests.console.workloads.workloads import a_rollout, a_workload, an_instance

NODES: Final = 1_000
ORGS: Final = 200
SESSIONS: Final = 500
BRAINS: Final = 10
WORKLOADS: Final = 60
REPLICAS_OF_A_MODEL: Final = 4
BOXES_OF_A_SESSION: Final = 2
STAMPS: Final = 20
LEAVES_OF_A_STAMP: Final = 4
WIO: Final = (3, 4, 3, 2)
DAYS: Final = 30
ENTRIES, EVENTS, OPERATIONS, ALERTS = 60_000, 60_000, 10_000, 4_000  # of those days
ALERTS_OPEN: Final = 60
SLOT_BYTES: Final = 1 << 20
MODEL: Final = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [192] * 8}]}
GIB: Final = 1 << 30
_LABELS: Final = {
    "tier": ("dram", "tier2"),
    "direction": ("in", "out"),
    "path": ("rail", "leaf", "spine"),
    "shard": tuple(f"job0.full.{number}" for number in range(4)),
}


def fill(part: float = 1.0) -> dict[str, object]:
    """What stands for parameters of addresses: see `tests.every_page`. A `part` below 1 is of what has
    happened."""
    chance = random.Random(8)
    now = timezone.now()
    orgs = _orgs(now)
    nodes, boxes = _fleet(now)
    _sessions(orgs, nodes, boxes, now)
    _routing(now)
    instance = _workloads(orgs)
    bucket = _buckets(orgs)
    _history(orgs, chance, now, part)
    alert = _alerts(orgs, chance, now, part)
    _numbers(part)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return {
        "orgs": "org-0",
        "members": "admin",
        "callers": "caller-0",
        "policy": 1,
        "scheduled": 1,
        "users": "admin",
        "tokenizers": 1,
        "buckets": bucket,
        "tokens": "none",
        "nodes": "ax-0",
        "boxes": "cs-0",
        "drivers": "job-0",
        "brains": "brain-0",
        "models": "model-0",
        "replicas": "replica-0",
        "workloads": instance.workload.name,
        "revisions": 1,
        "instances": instance.name,
        "join": "none",
        "sessions": "s-0",
        "jobs": "serve",
        "operations": Operation.objects.latest("id").pk,
        "alerts": alert.pk,
        "silences": Silence.objects.latest("pk").pk,
        "rules": "refill-slow",
        "channels": Channel.objects.latest("pk").pk,
        "audit": AuditEntry.objects.latest("pk").pk,
        "stores": 1,
        "views": 1,
    }


def _routing(now: datetime) -> None:
    """Brains, and a replica for each driver."""
    Brain.objects.bulk_create(Brain(name=f"brain-{number}", **_joined(now)) for number in range(BRAINS))
    drivers = list(Driver.objects.order_by("pk"))
    models = ServedModel.objects.bulk_create(
        ServedModel(name=f"model-{number}", model=f"llama-{number}", tokens_max=32_768)
        for number in range(-(-len(drivers) // REPLICAS_OF_A_MODEL))
    )
    Replica.objects.bulk_create(
        Replica(
            model=models[number // REPLICAS_OF_A_MODEL],
            name=f"replica-{number % REPLICAS_OF_A_MODEL}",
            url=f"http://127.0.0.1:{10_000 + number}",
            driver=driver,
        )
        for number, driver in enumerate(drivers)
    )


def _workloads(orgs: list[Org]) -> Instance:
    """Each with two instances and a rollout. Returns one of the instances."""
    instances = []
    for number in range(WORKLOADS):
        workload = a_workload(orgs[number % len(orgs)], f"workload-{number}")
        a_rollout(workload)
        instances += [an_instance(workload, ordinal, serving=True) for ordinal in range(2)]
    return instances[0]


def _buckets(orgs: list[Org]) -> int:
    """One of each org. Returns the number of one of them."""
    made = Bucket.objects.bulk_create(
        Bucket(org=org, name=f"{org.slug}-weights", credentials="{}", author_name="bench")
        for org in orgs
    )
    return int(made[0].pk)


def _orgs(now: datetime) -> list[Org]:
    orgs = Org.objects.bulk_create(
        Org(slug=f"org-{number}", name=f"Org {number}") for number in range(ORGS)
    )
    versions = PolicyVersion.objects.bulk_create(
        PolicyVersion(
            org=org,
            number=1,
            document='{"policy": {"ttl_last_use_seconds": 600}}',
            author_name="bench",
            reason="as agreed",
            made_at=now - timedelta(days=DAYS),
        )
        for org in orgs
    )
    PolicyInForce.objects.bulk_create(PolicyInForce(org=one.org, version=one) for one in versions)
    Caller.objects.bulk_create(
        Caller(
            org=org,
            name="engine",
            public_id=f"caller-{number}",
            token_sha256=f"{number:064}",
            created_by="bench",
        )
        for number, org in enumerate(orgs)
    )
    return orgs


def _joined(now: datetime) -> dict[str, Any]:
    return {
        "control_url": "http://127.0.0.1:9",
        "control_token": "t" * 40,
        "joined_at": now - timedelta(days=DAYS),
        "last_heartbeat_at": now + timedelta(hours=1),  # nobody is lost while pages are looked at
        "heartbeat_sha256": b"x" * 32,
        "software_version": "0.1.0",
    }


def _fleet(now: datetime) -> tuple[list[Node], list[Box]]:
    stamps = Stamp.objects.bulk_create(Stamp(name=f"stamp-{number}") for number in range(STAMPS))
    leaves = Leaf.objects.bulk_create(
        Leaf(name=f"leaf-{stamp}-{place}", stamp=stamps[stamp])
        for stamp in range(STAMPS)
        for place in range(LEAVES_OF_A_STAMP)
    )
    SpineLink.objects.bulk_create(
        SpineLink(name=f"{leaf.name}-up-{spine}", leaf=leaf, spine=f"spine-{spine}", gbits=400)
        for leaf in leaves
        for spine in range(2)
    )
    nodes = Node.objects.bulk_create(
        Node(
            name=f"ax-{number}",
            stamp=stamps[number % STAMPS],
            state=State.READY.value,
            held_state="",
            state_reason="",
            memory_bytes=512 * GIB,
            cpus=64,
            shards_max=64,
            protocol_min=1,
            protocol_max=2,
            data_address=f"tcp:10.0.{number // 250}.{number % 250}:8411",
            **_joined(now),
        )
        for number in range(NODES)
    )
    Nic.objects.bulk_create(
        Nic(node=node, leaf=leaves[_leaf(number, place)], name=f"eth{place}")
        for number, node in enumerate(nodes)
        for place in range(2)
    )
    boxes = Box.objects.bulk_create(
        Box(name=f"cs-{number}", stamp=stamps[number % STAMPS])
        for number in range(SESSIONS * BOXES_OF_A_SESSION)
    )
    domains = Domain.objects.bulk_create(
        Domain(box=box, index=index, wio=wio) for box in boxes for index, wio in enumerate(WIO)
    )
    Port.objects.bulk_create(
        Port(domain=domain, leaf=leaves[_leaf(number // len(WIO), domain.index)])
        for number, domain in enumerate(domains)
    )
    _targets("node", [node.name for node in nodes], now)
    return nodes, boxes


def _leaf(number: int, place: int) -> int:
    """Which leaf the so-manieth thing of the fleet has at this place: one of its stamp."""
    stamp, turn = number % STAMPS, number // STAMPS
    return stamp * LEAVES_OF_A_STAMP + (turn + place) % LEAVES_OF_A_STAMP


def _targets(kind: str, names: list[str], now: datetime) -> None:
    Target.objects.bulk_create(
        Target(kind=kind, name=name, generation=3, observed_generation=3, told_at=now, observed_at=now)
        for name in names
    )


def _sessions(orgs: list[Org], nodes: list[Node], boxes: list[Box], now: datetime) -> None:
    sessions = Session.objects.bulk_create(
        Session(
            name=f"s-{number}",
            org=orgs[number % ORGS],
            boxes_desired=BOXES_OF_A_SESSION,
            boxes_min=1,
            boxes_increment=1,
            bytes_per_token=192 * 8,
        )
        for number in range(SESSIONS)
    )
    drivers = Driver.objects.bulk_create(
        Driver(name=f"job-{number}", model=MODEL, **_joined(now)) for number in range(SESSIONS)
    )
    DriverOrg.objects.bulk_create(
        DriverOrg(driver=driver, org=session.org)
        for session, driver in zip(sessions, drivers, strict=True)
    )
    _targets("driver", [driver.name for driver in drivers], now)
    granted = SessionBox.objects.bulk_create(
        SessionBox(session=sessions[place // BOXES_OF_A_SESSION], box=box, ready=True)
        for place, box in enumerate(boxes)
    )
    jobs = Job.objects.bulk_create(
        Job(session=session, name="serve", driver=driver, running=True)
        for session, driver in zip(sessions, drivers, strict=True)
    )
    JobBox.objects.bulk_create(
        JobBox(job=jobs[place // BOXES_OF_A_SESSION], session_box=one)
        for place, one in enumerate(granted)
    )
    Stream.objects.bulk_create(
        _shard(jobs[place // BOXES_OF_A_SESSION], box, place, domain, nodes)
        for place, box in enumerate(boxes)
        for domain in range(len(WIO))
    )


def _shard(job: Job, box: Box, place: int, domain: int, nodes: list[Node]) -> Stream:
    """On a node of the same stamp; one in fifty crosses the spine."""
    index = place % BOXES_OF_A_SESSION * len(WIO) + domain
    port = _leaf(place, domain)
    number = (place + STAMPS * domain) % NODES
    tier = Tier.SPINE if (place * len(WIO) + domain) % 50 == 0 else Tier.RAIL
    leaf = f"leaf-{port // LEAVES_OF_A_STAMP}-{port % LEAVES_OF_A_STAMP}"
    away = f"leaf-{(port // LEAVES_OF_A_STAMP + 1) % STAMPS}-0"
    return Stream(
        job=job,
        group="full",
        index=index,
        box=box,
        domain=domain,
        wio=WIO[domain],
        slot_bytes=SLOT_BYTES,
        node=nodes[number],
        slots=4096,
        tier=tier,
        port_leaf=leaf,
        nic_leaf=away if tier is Tier.SPINE else leaf,
        why="no memory on a rail" if tier is Tier.SPINE else "",
    )


def _moments(count: float, chance: random.Random, now: datetime) -> list[datetime]:
    """In order, in the days before now."""
    back = (chance.uniform(1, DAYS * 86_400) for _ in range(round(count)))
    return [now - timedelta(seconds=seconds) for seconds in sorted(back, reverse=True)]


def _history(orgs: list[Org], chance: random.Random, now: datetime, part: float) -> None:
    AuditEntry.objects.bulk_create(
        [
            AuditEntry(
                at=at,
                actor_name="bench",
                means="token",
                action="policy.update",
                object_type="org",
                object_id=orgs[number % ORGS].slug,
                object_name=orgs[number % ORGS].name,
                org_id=orgs[number % ORGS].pk,
                reason="as agreed",
                before={"ttl_last_use_seconds": 600, "priority": 35},
                after={"ttl_last_use_seconds": 600 + number % 60, "priority": 35},
            )
            for number, at in enumerate(_moments(ENTRIES * part, chance, now))
        ],
        batch_size=5_000,
    )
    Event.objects.bulk_create(
        [
            Event(
                at=at,
                kind="policy.update",
                topics=[f"org:org-{number % ORGS}", f"session:s-{number % SESSIONS}", FLEET],
                sentence=f"policy.update: Org {number % ORGS}",
            )
            for number, at in enumerate(_moments(EVENTS * part, chance, now))
        ],
        batch_size=5_000,
    )
    Operation.objects.bulk_create(
        Operation(
            kind="session.resize",
            target=f"session:s-{number % SESSIONS}",
            org_id=orgs[number % ORGS].pk,
            role=Role.ON_CALL,
            sentence=f"Resize session s-{number % SESSIONS} to 2 boxes",
            state="succeeded",
            done=True,
            step=4,
            total=4,
            percent=100,
            message="All shards are where they should be.",
            response={},
            actor_name="bench",
            created_at=at,
            updated_at=at,
            done_at=at,
        )
        for number, at in enumerate(_moments(OPERATIONS * part, chance, now))
    )


def _alerts(orgs: list[Org], chance: random.Random, now: datetime, part: float) -> Alert:
    """One of those that fire."""
    moments = _moments(ALERTS * part, chance, now)
    alerts = Alert.objects.bulk_create(
        _alert(number, at, orgs[number % ORGS], now, is_open=number >= len(moments) - ALERTS_OPEN)
        for number, at in enumerate(moments)
    )
    Transition.objects.bulk_create(
        Transition(
            alert=alert,
            number=1,
            episode=1,
            at=alert.begun_at,
            before="pending",
            after="firing",
            sentence=alert.sentence,
        )
        for alert in alerts
    )
    channel = Channel.objects.create(
        name="pager", kind="webhook", address="http://127.0.0.1:9", shown="http://…"
    )
    Notification.objects.bulk_create(
        Notification(
            channel=channel,
            alert=alert,
            episode=1,
            what="firing",
            state="sent",
            sent_at=alert.begun_at,
            created_at=alert.begun_at,
        )
        for alert in alerts
    )
    Silence.objects.create(
        matchers=["rule=refill-slow", "org=org-7"],
        starts_at=now,
        ends_at=now + timedelta(days=1),
        author="bench",
        reason="new memory",
    )
    return alerts[-1]


def _alert(number: int, at: datetime, org: Org, now: datetime, *, is_open: bool) -> Alert:
    topic, labels = f"org:{org.slug}", {"case": str(number)}
    return Alert(
        rule="refill-slow",
        topic=topic,
        labels=labels,
        fingerprint=fingerprint("refill-slow", topic, labels),
        org=org,
        severity="page",
        state="firing" if is_open else "resolved",
        transition_count=1,
        begun_at=at,
        state_since=at,
        fired_at=at,
        observed_at=now,
        value=0.4,
        threshold=0.25,
        sentence=f"1.2 % of refills of {org.name} took more than 0.25 s",
        evidence={"windows": ["5 m and 1 h"]},
    )


# Numbers


def _numbers(part: float) -> None:
    """As telemetry has rolled them up: of what pages are asked for at every level, for as long as it is
    kept; of all others in steps of an hour."""
    end = int(time.time())
    asked = [FLEET, "org:org-0", "session:s-0", "driver:job-0", "node:ax-0"]
    others = [f"node:ax-{number}" for number in range(1, NODES)]
    others += [f"org:org-{number}" for number in range(1, ORGS)]
    others += [
        f"{kind}-{number}" for kind in ("session:s", "driver:job") for number in range(1, SESSIONS)
    ]
    topics = learn_topics([*asked, *others])
    _write("1h", topics[len(asked) :], others, end, DAYS * part)
    for level, days in (("10s", 3 * part), ("1m", 15 * part), ("1h", DAYS * part)):
        _write(level, topics[: len(asked)], asked, end, days)
        with connection.cursor() as cursor:
            line = end // LEVELS[level] * LEVELS[level]
            cursor.execute("UPDATE telemetry_watermark SET at = %s WHERE level = %s", [line, level])


def _write(level: str, numbers: list[int], names: list[str], end: int, days: float) -> None:
    step = LEVELS[level]
    buckets = range(int(end - days * 86_400) // step * step, end // step * step, step)
    make_days(level, {day_of(at) for at in range(buckets.start, end + 86_400, 86_400)})
    made = {kind: _cells(kind) for kind in ("kvss_", "swdriver_")}
    of = [made["kvss_" if name.startswith("node:") else "swdriver_"] for name in names]
    copy_in(
        level,
        (
            Stored(number, shape, bucket, cells[(bucket // step + number) % len(cells)])
            for bucket in buckets
            for number, (shape, cells) in zip(numbers, of, strict=True)
        ),
    )


def _cells(prefix: str) -> tuple[int, list[bytes]]:
    """The number of a shape, and some rows of it."""
    chance = random.Random(prefix)
    series = [
        one for name, metric in METRICS.items() if name.startswith(prefix) for one in _series(metric)
    ]
    shape = Shape(series)
    kinds = [one.kind for one in shape.series]
    rows = [
        Cells(
            [chance.randrange(1 << 20) for _ in range(kinds.count(Kind.COUNTER))],
            [(chance.randrange(1 << 34), 10, 1 << 30) for _ in range(kinds.count(Kind.GAUGE))],
            [
                [chance.random(), 25, *(chance.randrange(300) for _ in range(24))]
                for _ in range(kinds.count(Kind.HISTOGRAM))
            ],
        )
        for _ in range(30)
    ]
    names = Names()
    names.learn_shapes([shape], day_of(time.time()))
    return names.number(shape), [encoded(row) for row in rows]


def _series(metric: Metric) -> Iterator[Series]:
    """An org is summed up over, as in its own topic."""
    labels = [label for label in metric.labels if label != "org"]
    for values in product(*(_LABELS.get(label, ("a", "b")) for label in labels)):
        yield Series(metric.kind, metric.name, tuple(sorted(zip(labels, values, strict=True))))
