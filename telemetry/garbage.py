"""Looking for circles of garbage: when a process should not."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

THRESHOLDS: Final = (20_000, 20, 100)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While a process loads what it runs: nothing of it is garbage, and to look takes a seventh of the
    time. Nor is it looked through later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_less() -> None:
    """Call it when all is loaded: that stays. What a request leaves is freed by reference counts, and to
    look for circles after each 700 objects took a tenth of a brain's time, and made every sixth long
    list of the console take half as long again. Nor is it looked for now: that takes a sixth of a web
    process's start, and finds a megabyte.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()  # see `console.serve`
