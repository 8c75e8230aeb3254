"""Looking for circles of garbage, in processes that answer requests."""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (20_000, 20, 100)


def collect_less() -> None:
    """Call it when all is loaded: that stays. What a request leaves is freed by reference counts, and to
    look for circles after each 700 objects took a tenth of a brain's time, and made every sixth long
    list of the console take half as long again. Nor is it looked for now: that takes a sixth of a web
    process's start, and finds a megabyte.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()  # see `console.serve`
