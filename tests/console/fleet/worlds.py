"""A small fleet: one stamp with two leaves, a node that has joined, one that has not, and a box."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.fleet.membership import joins, tokens
from console.fleet.membership.facts import DriverFacts, NicFacts, NodeFacts
from console.fleet.models import Box, Domain, JoinToken, Leaf, Nic, Node, Port, SpineLink, Stamp

CONTROL_TOKEN = "t" * 32
FACTS = NodeFacts(
    control_url="http://10.0.0.7:8410",
    data_address="tcp:10.0.0.7:8411",
    software_version="0.1.0",
    protocol_min=1,
    protocol_max=2,
    memory_bytes=1 << 40,
    cpus=64,
)
DRIVER_FACTS = DriverFacts("http://10.0.0.9:8420", "0.1.0")
PLUGGED = (NicFacts("eth0", "leaf-1", 16, 100),)


@dataclass(frozen=True)
class World:
    """What the tests of the fleet begin with."""

    stamp: Stamp
    leaf: Leaf
    here: Node
    waits: Node
    box: Box


def new_token(kind: str = "node", uses: int = 10, **more: str) -> JoinToken:
    expires_at = timezone.now() + timedelta(hours=1)
    return tokens.issue(SYSTEM, kind=kind, uses=uses, expires_at=expires_at, **more)[0]


def refreshed(node: Node) -> Node:
    return Node.objects.get(pk=node.pk)


def make_world() -> World:
    stamp = Stamp.objects.create(name="east")
    leaf = Leaf.objects.create(name="leaf-1", stamp=stamp)
    other = Leaf.objects.create(name="leaf-2", stamp=stamp)
    SpineLink.objects.create(name="leaf-1-up", leaf=leaf, spine="spine-1", gbits=400)
    box = Box.objects.create(name="cs-1", stamp=stamp)
    for index in range(4):
        domain = Domain.objects.create(box=box, index=index, wio=8)
        Port.objects.create(domain=domain, leaf=leaf if index % 2 else other)
    waits = Node.objects.create(name="ax-2", stamp=stamp)
    Nic.objects.create(node=waits, leaf=other, name="eth0")
    here = joins.join_node(new_token(), "ax-1", CONTROL_TOKEN, FACTS, PLUGGED)
    return World(stamp, leaf, here, waits, box)
