"""How many shards a node takes: by what its shards really cost its processors, where that is known.

A declared number holds as the most. A shard that stores and loads all the time costs a core, one that
nobody asks costs nothing; so what they took in the busiest minute of the last ten is measured.
"""

from __future__ import annotations

import logging
import math
import re
import time
from datetime import timedelta
from typing import Final

from django.utils import timezone

from console.fleet.models import Node
from kvss_agent.metrics import SHARD_CPU
from telemetry.queries import Fold, Question, Unanswerable, ask
from telemetry.topics import of_source

log = logging.getLogger(__name__)

CORES_SHARE_MAX: Final = 0.8  # of a node's processors, for shards
CORES_PER_SHARD_MIN: Final = 0.05  # of one that nobody has asked lately: it may be asked any time
WINDOW_SECONDS: Final = 600
STEP_SECONDS: Final = 60
FRESH: Final = timedelta(minutes=15)  # what was measured holds for so long
SHARDS_OF_NODE_MAX: Final = 4096
_OF_FRAGMENTS: Final = re.compile(r"\.f[0-9]+$")


def shards_by_cpu(cpus: int, cores: float, shards: int) -> int:
    """How many shards fit on so many processors, if `shards` of them take so many cores."""
    each = max(cores / shards if shards else 0.0, CORES_PER_SHARD_MIN)
    return shards + max(0, math.floor((cpus * CORES_SHARE_MAX - cores) / each))


def shards_max(node_max: int, cpus: int, cores: float | None, shards: int | None) -> int:
    """What a node takes: what is declared or follows from its processors, or less if its shards cost
    more than that."""
    if cores is None or not shards or not cpus:
        return node_max
    return min(node_max, shards_by_cpu(cpus, cores, shards))


def measure() -> None:
    """Write down for each node how many shards have worked, and how many cores they took at most.

    Each node is asked about by itself: one that reports absurdly many shards is left out, and no other.
    """
    found = []
    for node in Node.objects.filter(joined_at__isnull=False).only("pk", "name"):
        try:
            node.cores_used, node.shards_measured = _measured(of_source("agent", node.name))
        except Unanswerable as why:
            log.warning("What the shards of %s cost is not known: %s", node.name, why)
            continue
        if node.shards_measured:
            node.measured_at = timezone.now()
            found.append(node)
    Node.objects.bulk_update(found, ["cores_used", "shards_measured", "measured_at"])


def _measured(topic: str) -> tuple[float, int]:
    """Cores in the busiest minute, and shards that have worked. Raises Unanswerable."""
    now = time.time()
    question = Question(
        topic=topic,
        metric=SHARD_CPU,
        fold=Fold.RATE,
        start=now - WINDOW_SECONDS,
        end=now,
        step=STEP_SECONDS,
        by=("shard",),
    )
    lines = ask(question, now, groups_max=SHARDS_OF_NODE_MAX).lines
    each = [[value if isinstance(value, float) else 0.0 for value in line.values] for line in lines]
    cores = max(map(sum, zip(*each, strict=True)), default=0.0)
    # Small shards of others' fragments cost something, but are no streams, which are what is limited.
    return cores, sum(any(one.values) for one in lines if not _OF_FRAGMENTS.search(one.labels["shard"]))
