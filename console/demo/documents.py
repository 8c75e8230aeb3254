"""What nodes and drivers of the demo are told beside what everybody's are: a tier 2 in the state
directory, and that what crosses the spine goes through the demo's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings

from console.control.documents import part
from console.demo import places, story
from console.fleet.models import Node
from console.placement.topology import Tier
from console.sessions.reaching import way


@part("node")
def tier2(name: str) -> Mapping[str, Any]:
    if name not in places.NODES:
        return {}
    path = places.tier2(settings.STATE_DIR)
    return {"tier2": {"kind": "posix", "path": str(path), "cap_bytes": story.TIER2_BYTES_MAX}}


@way
def over_spine(node: Node, tier: Tier) -> str | None:
    """Through the demo's spine, which is slow. One that has never run is no way."""
    where = places.over_spine(settings.STATE_DIR, node.name)
    is_ours = tier is Tier.SPINE and node.name in places.NODES and where.exists()
    return where.read_text() if is_ours else None
