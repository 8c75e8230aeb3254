"""What nodes of the demo are told beside what everybody's are: a tier 2 in the state directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings

from console.control.documents import part
from console.demo import places, story


@part("node")
def tier2(name: str) -> Mapping[str, Any]:
    if name not in places.NODES:
        return {}
    path = places.tier2(settings.STATE_DIR)
    return {"tier2": {"kind": "posix", "path": str(path), "cap_bytes": story.TIER2_BYTES_MAX}}
