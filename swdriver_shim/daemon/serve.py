"""`python -m swdriver_shim serve`: one driver, until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvss_agent import native
from kvss_agent.process import daemon
from swdriver_shim.adapters.lmcache_server import LmcacheServer
from swdriver_shim.daemon.host import DriverHost
from swdriver_shim.daemon.settings import Settings, parse
from swdriver_shim.daemon.shim import Shim
from telemetry.notify import notify

log = logging.getLogger("swdriver_shim")

SWITCH_SECONDS: Final = 0.0005
FULL_COLLECTIONS: Final = 1_000_000  # after so many of the middle generation


def main(arguments: Sequence[str]) -> int:
    # A full collection with a million columns takes 0.2 s and finds nothing, since columns are freed by
    # reference counts. Young generations are collected as usual.
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
    # The event loop gives the interpreter to a thread at each read and write, and waits for it so long.
    sys.setswitchinterval(SWITCH_SECONDS)
    return daemon.run("The driver", parse, _serve, arguments)


async def _serve(settings: Settings) -> int:
    native.build_in_background()
    stop = daemon.stop_signal()
    host = DriverHost(settings)
    listeners = [(org, daemon.listen(place)) for org, place in settings.lmcache]
    shim = Shim(
        settings.name,
        settings.state_dir,
        daemon.software(),
        token=settings.token,
        trust=host.trust,
        transfer_bytes=settings.transfer_memory,
        promotion=settings.promotion,
    )
    await asyncio.to_thread(shim.start)
    fronts = {org: LmcacheServer(one, partial(shim.objects_of, org)) for org, one in listeners}
    shim.fronts = {org: front.counts for org, front in fronts.items()}
    async with host.running(shim), daemon.watched():
        await stop.wait()
        notify("STOPPING=1")
    for front in fronts.values():
        await asyncio.to_thread(front.stop)
    await asyncio.to_thread(shim.stop)
    host.close()
    log.info("Stopped")
    return 0
