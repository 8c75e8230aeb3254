from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from console.fleet import services
from console.fleet.models import Box, Domain, Driver, JoinToken, Leaf, Nic, Node, Port, SpineLink, Stamp
from console.placement.topology import State, Tier


@pytest.fixture
def leaf(db: None) -> Leaf:
    return Leaf.objects.create(name="leaf-1", stamp=Stamp.objects.create(name="east"))


def joined() -> dict[str, Any]:
    return {
        "control_url": "http://10.0.0.1:8410",
        "control_token": "t" * 32,
        "heartbeat_sha256": bytes(32),
        "joined_at": timezone.now(),
    }


READY: dict[str, Any] = {"state": "ready", "held_state": "", "state_reason": ""}


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Node, {"name": "Not A Name"}),
        (Node, {"name": "a", "state": "happy", "held_state": "", **joined()}),
        (Node, {"name": "a", "state": "ready", "held_state": "cordoned", **joined()}),
        (Node, {"name": "a", "state": "lost", "held_state": "", **joined()}),
        (Node, {"name": "a", **READY}),
        (Node, {"name": "a", "memory_bytes": -1}),
        (Node, {"name": "a", "protocol_min": 2, "protocol_max": 1}),
        (Node, {"name": "a", "joined_at": timezone.now()}),
        (Stamp, {"name": ""}),
        (SpineLink, {"name": "a", "spine": "s", "gbits": 0}),
        (Driver, {"name": "a", "control_url": "http://x"}),
        (JoinToken, {"kind": "node", "uses_max": 1, "uses_left": 2}),
        (JoinToken, {"kind": "other", "uses_max": 1, "uses_left": 1}),
    ],
)
def test_the_database_refuses_what_can_not_be(leaf: Leaf, model: Any, values: dict[str, Any]) -> None:
    fields = {field.name for field in model._meta.get_fields()}
    fixed = {"stamp": leaf.stamp, "leaf": leaf, "secret_sha256": bytes(32), "expires_at": timezone.now()}
    with pytest.raises(IntegrityError), transaction.atomic():
        model.objects.create(**{k: v for k, v in fixed.items() if k in fields}, **values)


def test_the_database_refuses_nics_and_domains_that_can_not_be(leaf: Leaf) -> None:
    node = Node.objects.create(name="ax-1", stamp=leaf.stamp)
    box = Box.objects.create(name="cs-1", stamp=leaf.stamp)
    Nic.objects.create(node=node, leaf=leaf, name="eth0")
    domain = Domain.objects.create(box=box, index=0, wio=8)
    Port.objects.create(domain=domain, leaf=leaf)
    for model, values in (
        (Nic, {"node": node, "leaf": leaf, "name": "eth0"}),
        (Nic, {"node": node, "leaf": leaf, "name": "eth1", "wio": 0}),
        (Nic, {"node": node, "leaf": leaf, "name": "eth1", "gbits": 0}),
        (Domain, {"box": box, "index": 0, "wio": 8}),
        (Domain, {"box": box, "index": 4, "wio": 8}),
        (Domain, {"box": box, "index": 1, "wio": 0}),
        (Port, {"domain": domain, "leaf": leaf}),
    ):
        with pytest.raises(IntegrityError), transaction.atomic():
            model.objects.create(**values)


def test_placement_sees_what_can_take_streams(leaf: Leaf) -> None:
    for name, memory in (("ax-1", 1 << 40), ("ax-2", 0)):
        node = Node.objects.create(name=name, stamp=leaf.stamp, memory_bytes=memory, shards_max=6)
        Nic.objects.create(node=node, leaf=leaf, name="eth0", wio=8)
    box = Box.objects.create(name="cs-1", stamp=leaf.stamp)
    Port.objects.create(domain=Domain.objects.create(box=box, index=0, wio=8), leaf=leaf)
    Box.objects.create(name="cs-2", stamp=leaf.stamp)
    fleet = services.topology()
    assert [node.name for node in fleet.nodes] == ["ax-1"]  # of the other no memory is known
    assert fleet.node["ax-1"].state is State.LOST
    assert [box.name for box in fleet.boxes] == ["cs-1"]
    assert fleet.tier("cs-1", 0, fleet.node["ax-1"]) is Tier.RAIL


def test_only_who_joined_and_is_heard_of_can_be_asked(leaf: Leaf) -> None:
    Node.objects.create(name="new", stamp=leaf.stamp)
    Node.objects.create(name="here", stamp=leaf.stamp, **READY, **joined())
    Node.objects.create(name="gone", stamp=leaf.stamp, **joined())
    Driver.objects.create(name="new")
    Driver.objects.create(name="here", **joined())
    Driver.objects.create(name="gone", **joined(), lost_at=timezone.now())
    assert [node.name for node in services.reachable_nodes()] == ["here"]
    assert [driver.name for driver in services.reachable_drivers()] == ["here"]
