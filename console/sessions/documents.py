"""What sessions say of desired documents: the homes of a driver's shards, and the shards of a node."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from django.db.models import Q, QuerySet

from console.authority.capabilities import for_move
from console.control.documents import NotYet, common_part, part
from console.control.services import secret_of
from console.fleet.models import Driver, Node, Removed, SpineLink
from console.placement.topology import Tier
from console.sessions import reaching
from console.sessions.models import Job, Phase, Shard
from console.sessions.rules import in_force
from console.sessions.world import model_of
from kvss_agent.security.identity import fingerprint
from swdriver_shim.desired import AGENTS_REMOVED_MAX


@part("driver")
def homes(name: str) -> Mapping[str, Any]:
    """Where the shards of its job are: while one moves, where it goes on."""
    related = ("session__org", "driver")
    job = Job.objects.filter(driver__name=name).select_related(*related).first()
    if job is None:
        raise NotYet("It has no job: register one in a session.")
    if not job.running:
        raise NotYet("The shards of its job are being made.")
    shards = job.shards.select_related("node", "next_node", "box")
    worst = in_force(job.session.org, job.session.path).limit(float("inf")).worst
    return {"homes": [_home(job, shard, worst) for shard in shards]}


@common_part("driver")
def agents_removed() -> Mapping[str, Any]:
    """Where nobody is any more. Left out while there is none: older drivers refuse the field."""
    there = {address for node in Node.objects.all() for address in _addresses(node)}
    gone = Removed.objects.filter(kind="node")[:AGENTS_REMOVED_MAX]
    former = (
        Node(name=one.name, data_address=one.data_address, public_key=one.public_key) for one in gone
    )
    # Newest first; each once.
    found = dict.fromkeys(address for node in former for address in _addresses(node))
    left = [address for address in found if address not in there][:AGENTS_REMOVED_MAX]
    return {"agents_removed": sorted(left)} if left else {}


def _addresses(node: Node) -> set[str]:
    return {reaching.address(node, tier) for tier in Tier}


def _home(job: Job, shard: Shard, worst: Tier) -> dict[str, Any]:
    shard.job = job
    goes_on = shard.phase == Phase.MOVING
    node = shard.next_node if goes_on and shard.next_node else shard.node
    tier, port_leaf, nic_leaf = (
        (shard.next_tier, shard.next_port_leaf, shard.next_nic_leaf)
        if goes_on
        else (shard.tier, shard.port_leaf, shard.nic_leaf)
    )
    path = Tier(tier or 0)
    return {
        "group": shard.group,
        "index": shard.index,
        "address": reaching.address(node, path),
        "shard": shard.name,
        **_control(job, shard, node),
        "path": {
            "session": job.session.name,
            "tier": path.name.lower(),
            "box": shard.box.name,
            "domain": shard.domain,
            "port_leaf": port_leaf,
            "nic_leaf": nic_leaf,
            "node": node.name,
            "link": _link(shard.name, port_leaf) if path is Tier.SPINE else "",
            "allowed": path <= worst,
        },
    }


def _control(job: Job, shard: Shard, node: Node) -> dict[str, Any]:
    """While it moves: what its driver may ask of the node where it goes on. Nobody is given a token."""
    if shard.phase != Phase.MOVING or shard.next_node is None:
        return {}
    source = reaching.address(shard.node, Tier(shard.tier))
    capability = for_move(
        job.driver, node, shard=shard.name, source=source, slots=max(shard.slots, shard.next_slots or 0)
    )
    if capability is None:
        return {}
    key = fingerprint(node.public_key)
    return {"control": {"url": node.control_url, "capability": capability, "key": key}}


def _link(shard: str, leaf: str) -> str:
    """Of a leaf's links to the spine the one that this shard's bytes are booked on: always the same."""
    links = list(
        SpineLink.objects.filter(leaf__name=leaf).order_by("name").values_list("name", flat=True)
    )
    return links[zlib.crc32(shard.encode()) % len(links)] if links else ""


def _on(node: Node) -> QuerySet[Shard]:
    return Shard.objects.filter(
        Q(node=node) & (Q(slots__gt=0) | Q(phase=Phase.SIZING))
        | Q(next_node=node, phase__in=[Phase.MAKING, Phase.MOVING])
    )


def shards_of_node(node: Node) -> set[str]:
    """What its document names."""
    return {shard.name for shard in _on(node).select_related("job__driver", "job__session")}


def shards_of_driver(name: str) -> set[tuple[str, int]]:
    """What its document names, by group and number."""
    shards = Shard.objects.filter(job__driver__name=name, job__running=True)
    return set(shards.values_list("group", "index"))


@part("node")
def shards(name: str) -> Mapping[str, Any]:
    """All that it has or is about to have, and the drivers that may connect."""
    node = Node.objects.get(name=name)
    found = _on(node)
    related = ("job__driver", "job__session")
    specs = [_spec(shard, node) for shard in found.select_related(*related).order_by("pk")]
    drivers = sorted({spec["driver"] for spec in specs})
    return {
        "shards": specs,
        "peers": [_peer(driver, node) for driver in drivers],
    }


def _peer(driver: str, node: Node) -> dict[str, Any]:
    """An agent that has no key itself is of a version that knows of none."""
    key = Driver.objects.values_list("public_key", flat=True).get(name=driver)
    said = {"name": driver, "secret": secret_of("driver", driver)}
    return {**said, "key": fingerprint(key)} if key and node.public_key else said


def _spec(shard: Shard, node: Node) -> dict[str, Any]:
    comes = shard.node_id != node.pk
    sizing = shard.phase == Phase.SIZING
    return {
        "name": shard.name,
        "driver": shard.job.driver.name,
        "slot_bytes": shard.slot_bytes,
        "slots": shard.next_slots if comes or sizing else shard.slots,
        "applied": shard.next_count_from if comes else shard.count_from,
        "namespace": model_of(shard.job.driver).namespace().digest().hex(),
        "part": f"{shard.group.lower()}.{shard.index}",
    }
