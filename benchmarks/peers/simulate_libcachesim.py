"""libCacheSim as a second opinion. Reads requests, sizes and policies as JSON, writes hits as JSON.

Run by the interpreter of its own environment. It knows no prefixes: every block is asked for, and counts
as a hit if all before it in its request did.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any


def main() -> None:
    library = importlib.import_module("libcachesim")
    told = json.load(sys.stdin)
    hits = {
        policy: [_hits(library, policy, size, told["requests"]) for size in told["sizes"]]
        for policy in told["policies"]
    }
    json.dump(hits, sys.stdout)


def _hits(library: Any, policy: str, size: int, requests: Sequence[Sequence[int]]) -> int:
    cache = getattr(library, policy)(cache_size=size)
    asked = library.Request()
    asked.obj_size = 1
    hits = 0
    for blocks in requests:
        whole = True
        for block in blocks:
            asked.obj_id = block
            whole = cache.get(asked) and whole
            hits += whole
    return hits


if __name__ == "__main__":
    main()
