"""Numbers for charts, and what a page draws of them."""

from __future__ import annotations

import json
import re
from typing import Any

from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of

HITS = [
    Series(Kind.COUNTER, "swdriver_hit_tokens_total", (("tier", tier),)) for tier in ("dram", "tier2")
]
MISSED = Series(Kind.COUNTER, "swdriver_missed_tokens_total", (("reason", "never_stored"),))
ASKED = Series(Kind.COUNTER, "swdriver_requested_tokens_total")
REFILL = Series(Kind.HISTOGRAM, "swdriver_refill_seconds")
OUT = Series(Kind.COUNTER, "swdriver_bytes_total", (("direction", "out"),))


def tell(topic: str, now: float) -> int:
    """What happened in the ten seconds before these; in two pieces, as ingest writes them."""
    RollUp().tend_days(now)
    shape, bucket = Shape([*HITS, MISSED, ASKED, REFILL, OUT]), bucket_of(now) - 10
    cells = shape.cells(
        {HITS[0]: 30, HITS[1]: 10, MISSED: 10, ASKED: 50, REFILL: [0.1, 48, 9, 1], OUT: 5000}
    )
    copy_in(FRESH, Names().stored([Row(topic, bucket, shape, cells)] * 2, day_of(now)))
    return bucket


def drawn(page: str) -> list[dict[str, Any]]:
    """What the browser is given, of each chart."""
    found = re.findall(r'<script id="chart-[^"]+" type="application/json">(.*?)</script>', page)
    return [json.loads(text) for text in found]
