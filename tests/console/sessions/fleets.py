"""Small fleets as rows: boxes with four domains on four leaves, and a node on each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from console.fleet.models import Box, Domain, Driver, Leaf, Nic, Node, Port, Stamp
from console.operations.models import Operation
from console.orgs.models import Org
from console.placement.topology import State, Tier
from console.sessions import services
from console.sessions.changes import jobs
from console.sessions.models import DriverOrg, Job, Session, SessionBox, Stream
from console.sessions.steps import relocation
from tests.conftest import People

WIO = (3, 4, 3, 2)
GIB = 1 << 30
MODEL = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [192, 256, 192, 128]}]}


def leaf(name: str) -> Leaf:
    stamp, _ = Stamp.objects.get_or_create(name="s1")
    return Leaf.objects.get_or_create(name=name, defaults={"stamp": stamp})[0]


def make_node(name: str, *leaves: str, memory_bytes: int = GIB, **more: Any) -> Node:
    now = timezone.now()
    stamp, _ = Stamp.objects.get_or_create(name="s1")
    defaults = {
        "state": State.READY.value,
        "held_state": "",
        "state_reason": "",
        "shards_max": 100,
        "control_url": "http://127.0.0.1:9",
        "control_token": "t" * 40,
        "data_address": f"unix:/nowhere/{name}",
        "joined_at": now,
        "last_heartbeat_at": now,
        "heartbeat_sha256": b"x" * 32,
    }
    node = Node.objects.create(name=name, stamp=stamp, memory_bytes=memory_bytes, **(defaults | more))
    for number, of in enumerate(leaves):
        Nic.objects.create(node=node, leaf=leaf(of), name=f"nic{number}")
    return node


def make_box(name: str, leaves: Sequence[str] = ("l1", "l2", "l3", "l4")) -> Box:
    stamp, _ = Stamp.objects.get_or_create(name="s1")
    box = Box.objects.create(name=name, stamp=stamp)
    for index, (of, wio) in enumerate(zip(leaves, WIO, strict=True)):
        domain = Domain.objects.create(box=box, index=index, wio=wio)
        Port.objects.create(domain=domain, leaf=leaf(of))
    return box


def make_driver(name: str, model: Any = MODEL, **more: Any) -> Driver:
    now = timezone.now()
    defaults = {
        "control_url": "http://127.0.0.1:9",
        "control_token": "t" * 40,
        "joined_at": now,
        "last_heartbeat_at": now,
        "heartbeat_sha256": b"x" * 32,
    }
    driver = Driver.objects.create(name=name, model=model, **(defaults | more))
    DriverOrg.objects.create(driver=driver)  # all orgs, as one of an earlier version
    return driver


def make_fleet(boxes: int = 4, **node: Any) -> None:
    for number in range(1, 5):
        make_node(f"ax{number}", f"l{number}", **node)
    for number in range(1, boxes + 1):
        make_box(f"cs{number}")


def make_across(org: Org) -> Session:
    """A job of an org whose second stream was placed across the spine, though its rail is free now."""
    make_fleet(boxes=1)
    session = Session.objects.create(
        name="chat", org=org, boxes_desired=1, boxes_min=1, boxes_increment=1
    )
    box = Box.objects.get(name="cs1")
    SessionBox.objects.create(session=session, box=box, ready=True)
    job = Job.objects.create(session=session, name="serve", driver=make_driver("job7"), running=True)
    for index in range(4):
        across = index == 1
        Stream.objects.create(
            job=job,
            group="full",
            index=index,
            box=box,
            domain=index,
            wio=3,
            slot_bytes=4096,
            slots=10,
            node=Node.objects.get(name="ax1" if across else f"ax{index + 1}"),
            tier=(Tier.SPINE if across else Tier.RAIL).value,
            port_leaf=f"l{index + 1}",
            nic_leaf="l1" if across else f"l{index + 1}",
            why="ax2 with a NIC on its leaf is cordoned" if across else "",
        )
    return session


def arrive(operation: Operation) -> None:
    """As if agents and drivers had done all that this operation wants of them."""
    for shard in relocation.of_operation(operation):
        assert shard.next_node is not None
        relocation._finish(shard, shard.next_node, relocation._Changes())


def run_job(people: People, driver: Driver) -> None:
    """A job of that driver runs in the session `chat`, as if it had been started long ago."""
    admin = people.principal("platform_admin")
    with transaction.atomic():
        starting = jobs.start_job(admin, services.for_change(admin, "chat"), "serve", driver)
    arrive(starting)
    Operation.objects.filter(pk=starting.pk).delete()


def waits_for_the_fleet(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lock timeouts with which this module waits for the fleet from here on, in vain."""
    timeouts: list[str] = []

    def lock() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            timeouts.extend(cursor.fetchone())

    monkeypatch.setattr(module, "lock_fleet", lock)
    return timeouts
