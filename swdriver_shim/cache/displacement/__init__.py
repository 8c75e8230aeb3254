"""The displacement policies that an org can choose from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from swdriver_shim.cache.displacement.arc import Arc
from swdriver_shim.cache.displacement.base import Displaceable, DisplacementPolicy
from swdriver_shim.cache.displacement.changeover import Changeover
from swdriver_shim.cache.displacement.competition import Choice, Competition
from swdriver_shim.cache.displacement.cost import Cost
from swdriver_shim.cache.displacement.lru import Lfu, Lru
from swdriver_shim.cache.displacement.s3fifo import S3Fifo
from swdriver_shim.cache.displacement.slru import Slru

POLICIES: Final[dict[str, Callable[[], DisplacementPolicy[Any]]]] = {
    policy.name: policy for policy in (Lru, Lfu, Slru, S3Fifo, Arc, Cost, Competition)
}

DEFAULT: Final = Competition.name

__all__ = [
    "DEFAULT", "POLICIES", "Changeover", "Choice", "Competition", "Displaceable", "DisplacementPolicy",
]  # fmt: skip
