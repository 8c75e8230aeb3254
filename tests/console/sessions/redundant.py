"""Streams whose columns are stored redundantly, and agents that say how they are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

from django.db.models import F

from console.control.observed import Redundancy, Shard
from console.fleet.models import Driver, Nic, Node
from console.sessions.models import FragmentHolder, Job, Session, SessionBox, Stream
from console.sessions.steps import redundancy
from tests.console.sessions.fleets import make_box, make_driver

DISK = {"tier2": {"kind": "posix", "path": "/mnt/kv", "cap": "1TiB", "shared": False}}
MODEL = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [192, 256]}]}
SLOT = 1 << 20


def serve(name: str, *nodes: str, org: Any = None, model: Any = MODEL) -> Driver:
    """A driver whose job runs with a stream on each of these nodes."""
    driver = make_driver(name, model)
    session = Session.objects.create(name=name, org=org, boxes_desired=1, boxes_min=1, boxes_increment=1)
    box = make_box(f"box-{name}")
    SessionBox.objects.create(session=session, box=box, ready=True)
    job = Job.objects.create(session=session, name="serve", driver=driver, running=True)
    for index, node in enumerate(nodes):
        nic = Nic.objects.select_related("leaf").get(node__name=node)
        Stream.objects.create(
            job=job,
            group="full",
            index=index,
            box=box,
            domain=index,
            wio=3,
            slot_bytes=SLOT,
            slots=10,
            node=Node.objects.get(name=node),
            tier=0,
            port_leaf=nic.leaf.name,
            nic_leaf=nic.leaf.name,
        )
    return driver


def who(index: int = 0) -> list[str]:
    """The nodes that store the fragments of this shard, in order."""
    found = FragmentHolder.objects.filter(index=index).order_by("place")
    return list(found.values_list("node__name", flat=True))


def have_been_so_for(seconds: float) -> None:
    """All nodes have had their states for longer by this."""
    Node.objects.update(state_since=F("state_since") - timedelta(seconds=seconds))


def report(incomplete: int = 0, at: str = "", **said: Any) -> None:
    """The agents of all streams say this: of the present holders, unless it is of those before. `at`:
    the node whose fragments columns lack; without one, of the newest holder."""
    newest = FragmentHolder.objects.order_by("since", "node__name").last()
    assert newest is not None
    lacking = FragmentHolder.objects.filter(node__name=at).first() or newest
    places = [incomplete if place == lacking.place else 0 for place in range(lacking.place + 1)]
    its = {
        "state": "ready",
        "columns": 5000,
        "holders_since": newest.since.timestamp(),
        "incomplete_at": places,
        "most_lacking": min(1, incomplete),
        **said,
    }

    class Saying:
        def __init__(self, _nodes: set[Node], _drivers: set[Driver]) -> None: ...

        def shard_at(self, _node: str, name: str) -> Shard:
            return Shard(name=name, redundancy=Redundancy(incomplete=incomplete, **its))

    with mock.patch.object(redundancy, "Observations", Saying):
        redundancy.look()
