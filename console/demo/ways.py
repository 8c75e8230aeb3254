"""Which ways drivers of the demo take: across its spine, what is placed so."""

from __future__ import annotations

from django.conf import settings

from console.demo import places
from console.fleet.models import Node
from console.placement.topology import Tier
from console.sessions.endpoints import way


@way
def over_spine(node: Node, tier: Tier) -> str | None:
    """A spine that has never run is no way."""
    where = places.over_spine(settings.STATE_DIR, node.name)
    is_ours = tier is Tier.SPINE and node.name in places.NODES and where.exists()
    return where.read_text() if is_ours else None
