"""Threads that work on one column after the other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvss_agent.tier2.address import Address

log = logging.getLogger(__name__)

THREADS: Final = 4


class Workers:
    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(THREADS, name)

    def submit(self, work: Callable[[Address], None], address: Address) -> None:
        """Nothing, once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(_logged, work, address)

    def close(self) -> None:
        """Returns when what was begun has ended."""
        self._pool.shutdown(cancel_futures=True)


def _logged(work: Callable[[Address], None], address: Address) -> None:
    try:
        work(address)
    except Exception:
        log.exception("The front of tier 2 could not copy %s", address.name)
