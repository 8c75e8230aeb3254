"""What the fleet's description says of desired documents: the tier 2 of a node, and what was that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.control.documents import part
from console.fleet import retired_stores
from console.fleet.descriptions.tier2 import told
from console.fleet.models import Node


@part("node")
def tier2(name: str) -> Mapping[str, Any]:
    node = Node.objects.only("declared", "public_key").get(name=name)
    said = node.declared.get("tier2")
    stores = retired_stores.told(name)
    return {
        **({"tier2": told(said)} if said else {}),
        **({"retiring": stores} if stores else {}),
        # Of which others say more. An agent without an identity is older, and would refuse the document.
        **({"orgs": {}} if node.public_key else {}),
    }
