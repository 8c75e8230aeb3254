"""What the fleet's description says of desired documents: the tier 2 of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.control.documents import part
from console.fleet.models import Node
from console.fleet.tier2 import told


@part("node")
def tier2(name: str) -> Mapping[str, Any]:
    said = Node.objects.values_list("declared", flat=True).get(name=name).get("tier2")
    return {"tier2": told(said)} if said else {}
