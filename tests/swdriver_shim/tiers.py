"""Drivers whose agents have a tier 2."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.store import Tier2
from tests.kvss_agent.integrity import Difference, differences

SOON = 20.0  # seconds: long for a test, and it ends as soon as all is there


@contextlib.contextmanager
def tier_requests(
    files: Path, kind: Callable[[asyncio.AbstractEventLoop], TierRequests] = TierRequests
) -> Iterator[TierRequests]:
    """A tier 2 on a loop of its own, as an agent has it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = kind(loop)
    store = Tier2(Posix(files), Caps(1 << 30, 1 << 30))
    asyncio.run_coroutine_threadsafe(store.open(), loop).result()
    made.store = store
    try:
        yield made
        there = asyncio.run_coroutine_threadsafe(differences(store), loop).result()
        assert there == Difference((), (), ())
    finally:
        asyncio.run_coroutine_threadsafe(store.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def kept(files: Path) -> list[Path]:
    """The files of tier 2, also while a driver removes folders under the walk."""
    return [Path(folder) / name for folder, _, names in os.walk(files) for name in names]


def contents(files: Path) -> list[bytes]:
    """What is in the files of tier 2, also while a driver renames and removes them.

    A file that has moved since it was listed would be missed: they are listed anew then.
    """
    while True:
        try:
            return [path.read_bytes() for path in kept(files)]
        except FileNotFoundError:
            continue
