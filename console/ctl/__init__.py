"""`tidegatectl`: the console's REST API at a command line. No Django, nothing else of the console."""

from __future__ import annotations

import sys

# Where rich and click are installed, httpx loads them for a command line of its own, which takes a
# quarter of the time in which this one starts. Without this module it has none.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
