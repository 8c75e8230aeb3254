"""The store: arenas of column slots, the two queues, transports and tier-2 files. No Django."""

from __future__ import annotations

import sys

# Where rich and click are installed, httpx loads them for a command line of its own, which takes a tenth
# of the time in which a process of ours starts. Without this module it has none.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
