"""`python -m cluster_server`: one Cluster Server, until SIGTERM. See `--help`."""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import replace

from cluster_server.inventory import Inventory
from cluster_server.processes import cgroups
from cluster_server.processes.backend import ProcessBackend, ProcessOptions
from cluster_server.processes.core import Limits
from cluster_server.processes.kernel import LinuxKernel
from cluster_server.server import serving
from cluster_server.settings import Settings, parse
from kvss_agent.process import daemon
from kvss_agent.process.state_dir import locked
from telemetry.notify import notify

log = logging.getLogger("cluster_server")


def main() -> int:
    return daemon.run("The Cluster Server", parse, _serve, sys.argv[1:])


async def _serve(settings: Settings) -> int:
    stop = daemon.stop_signal()
    with contextlib.ExitStack() as opened:
        opened.enter_context(locked(settings.state))
        groups = cgroups.find(settings.state, settings.cgroups) if settings.has_cgroups else None
        inventory = Inventory(settings.state / "boxes.json", settings.boxes)
        backend = ProcessBackend(_options(settings), LinuxKernel(groups))
        await backend.start()
        try:
            async with serving(backend, inventory, settings.server) as server, daemon.watched():
                log.info("Listening on %s", " and ".join(server.targets))
                await stop.wait()
                notify("STOPPING=1")
            if settings.ends_instances:
                log.info("Ending all instances and jobs, within %g s", settings.end_seconds)
                await backend.end_all(settings.end_seconds)
        finally:
            await backend.stop()
    log.info("Stopped%s", "" if settings.ends_instances else "; what it has started goes on")
    return 0


def _options(settings: Settings) -> ProcessOptions:
    return replace(
        ProcessOptions(settings.state, settings.command),
        host=settings.name,
        jobs_at_once=settings.jobs_at_once,
        jobs_kept=settings.jobs_kept,
        limits=Limits(settings.silent_seconds),
    )


if __name__ == "__main__":
    sys.exit(main())
