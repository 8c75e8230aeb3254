"""What sessions say of desired documents: the homes of a driver's shards, and the shards of a node."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from django.db.models import Q

from console.control.documents import NotYet, part
from console.control.services import secret_of
from console.fleet.models import Node, SpineLink
from console.placement.topology import Tier
from console.sessions import reaching
from console.sessions.models import Job, Phase, Shard
from console.sessions.rules import in_force
from console.sessions.world import model_of


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
        "control": {"url": node.control_url, "token": str(node.control_token)},
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


def _link(shard: str, leaf: str) -> str:
    """Of a leaf's links to the spine the one that this shard's bytes are booked on: always the same."""
    links = list(
        SpineLink.objects.filter(leaf__name=leaf).order_by("name").values_list("name", flat=True)
    )
    return links[zlib.crc32(shard.encode()) % len(links)] if links else ""


@part("node")
def shards(name: str) -> Mapping[str, Any]:
    """All that it has or is about to have, and the drivers that may connect."""
    node = Node.objects.get(name=name)
    found = Shard.objects.filter(
        Q(node=node) & (Q(slots__gt=0) | Q(phase=Phase.SIZING))
        | Q(next_node=node, phase__in=[Phase.MAKING, Phase.MOVING])
    )
    related = ("job__driver", "job__session")
    specs = [_spec(shard, node) for shard in found.select_related(*related).order_by("pk")]
    drivers = sorted({spec["driver"] for spec in specs})
    return {
        "shards": specs,
        "peers": [{"name": driver, "secret": secret_of("driver", driver)} for driver in drivers],
    }


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
