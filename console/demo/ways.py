"""Send streams of the demo that are placed across the spine through its relay."""

from __future__ import annotations

from django.conf import settings

from console.demo import places
from console.fleet.models import Node
from console.placement.topology import Tier
from console.sessions.endpoints import way


@way
def over_spine(node: Node, tier: Tier) -> str | None:
    """The address of the node's relay; None for other paths, or before the relay has ever run."""
    where = places.over_spine(settings.STATE_DIR, node.name)
    is_ours = tier is Tier.SPINE and node.name in places.NODES and where.exists()
    return where.read_text() if is_ours else None
