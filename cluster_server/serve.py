"""`python -m cluster_server`: one Cluster Server, until SIGTERM. See `--help`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import replace
from typing import Final

from cluster_server.backend import Backend
from cluster_server.inventory import Inventory, on_disk
from cluster_server.kubernetes.options import KubernetesOptions
from cluster_server.processes import cgroups
from cluster_server.processes.backend import ProcessBackend, ProcessOptions
from cluster_server.processes.core import Limits
from cluster_server.processes.kernel import LinuxKernel
from cluster_server.processes.spares import Spares
from cluster_server.server import serving
from cluster_server.settings import Settings, parse
from kvss_agent.process import daemon
from kvss_agent.process.state_dir import locked
from telemetry.notify import notify

EX_TEMPFAIL: Final = 75  # as sysexits has it: try again

log = logging.getLogger("cluster_server")


def main() -> int:
    return daemon.run("The Cluster Server", parse, _serve, sys.argv[1:])


async def _serve(settings: Settings) -> int:
    stop = daemon.stop_signal()
    if settings.kubernetes:
        return await _serve_kubernetes(settings, settings.kubernetes, stop)
    with contextlib.ExitStack() as opened:
        opened.enter_context(locked(settings.state))
        groups = cgroups.find(settings.state, settings.cgroups) if settings.has_cgroups else None
        options = _options(settings)
        spares = Spares(options.command, options.environment, settings.spares)
        backend = ProcessBackend(options, LinuxKernel(groups, spares), spares)
        inventory = on_disk(settings.state / "boxes.json", settings.boxes)
        await backend.start()
        return await _serve_backend(settings, backend, inventory, stop, asyncio.Event())


async def _serve_kubernetes(settings: Settings, options: KubernetesOptions, stop: asyncio.Event) -> int:
    """Wait for the Lease, and then until another server could have it."""
    from cluster_server.kubernetes.backend import KubernetesBackend  # only this needs Kubernetes' client

    backend = KubernetesBackend(options)
    log.info("Waiting for the Lease")
    starting, told = asyncio.create_task(backend.start()), asyncio.create_task(stop.wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if not starting.done():
        starting.cancel()  # which lets go of the Lease
        await asyncio.wait({starting})
        log.info("Stopped before it was started")
        return 0
    await starting
    try:
        inventory = await backend.inventory(settings.boxes)
    except BaseException:
        await backend.stop()  # or the next one waits for its Lease
        raise
    return await _serve_backend(settings, backend, inventory, stop, backend.lost)


async def _serve_backend(
    settings: Settings,
    backend: Backend,
    inventory: Inventory,
    stop: asyncio.Event,
    lost: asyncio.Event,
) -> int:
    """Until SIGTERM, or until this server is `lost`: another one works in its place."""
    try:
        async with serving(backend, inventory, settings.server) as server, daemon.watched():
            log.info("Listening on %s", " and ".join(server.targets))
            ends = [asyncio.create_task(one.wait()) for one in (stop, lost)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for one in ends:
                one.cancel()
            notify("STOPPING=1")
        if lost.is_set():
            return EX_TEMPFAIL
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
