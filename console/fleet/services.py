"""The fleet as others ask for it: what there is, who may see and change it, and the states of nodes."""

from __future__ import annotations

from django.db.models import Prefetch, QuerySet

from console.fleet.models import Box, Domain, Driver, Nic, Node, Port
from console.placement import topology as placement
from console.placement.topology import State


def topology() -> placement.Fleet:
    """The fleet as placement reads it. What can take no stream yet is left out: a node whose memory
    nobody has told, a box without domains."""
    nics = Prefetch("nics", Nic.objects.select_related("leaf"))
    ports = Prefetch("ports", Port.objects.select_related("leaf"))
    domains = Prefetch("domains", Domain.objects.prefetch_related(ports))
    nodes = Node.objects.filter(memory_bytes__gt=0).prefetch_related(nics)
    boxes = Box.objects.prefetch_related(domains)
    return placement.Fleet(
        nodes=tuple(_node(node) for node in nodes if node.nics.all()),
        boxes=tuple(_box(box) for box in boxes if _is_whole(box)),
    )


def _node(node: Node) -> placement.Node:
    return placement.Node(
        name=node.name,
        nics=tuple(placement.Nic(nic.leaf.name, nic.wio) for nic in node.nics.all()),
        memory_bytes=node.memory_bytes,
        shards_max=node.shards_max,
        state=State(node.state),
    )


def _is_whole(box: Box) -> bool:
    domains = box.domains.all()
    return bool(domains) and all(domain.ports.all() for domain in domains)


def _box(box: Box) -> placement.Box:
    """Its domains in the order of their numbers, which are 0 to 3."""
    return placement.Box(
        name=box.name,
        domains=tuple(
            placement.Domain(tuple(port.leaf.name for port in domain.ports.all()), domain.wio)
            for domain in box.domains.all()
        ),
    )


def reachable_nodes() -> QuerySet[Node]:
    """Those whose agents can be asked now."""
    return Node.objects.filter(joined_at__isnull=False).exclude(state=State.LOST.value)


def reachable_drivers() -> QuerySet[Driver]:
    return Driver.objects.filter(joined_at__isnull=False, lost_at=None)
