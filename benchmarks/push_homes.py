"""For the worker of `benchmarks.push`: each driver keeps its columns in a shard of its own name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.push import SECRET
from console.control import documents


def home(name: str) -> Mapping[str, Any]:
    where = {"group": "full", "index": 0, "address": os.environ["BENCH_AGENT"], "shard": name}
    return {"secret": SECRET, "homes": [where]}


documents._parts["driver"] = [home]  # noqa: SLF001 - in place of what sessions say
