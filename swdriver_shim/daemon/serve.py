"""`python -m swdriver_shim serve`: one driver, until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from kvss_agent import native
from kvss_agent.process import daemon
from kvss_agent.process.logs import set_up
from kvss_agent.process.membership import JoiningProcess, member
from kvss_agent.process.options import WrongSettings
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.security.trust import Trust
from kvss_agent.settings import warn_of_plain_control
from swdriver_shim.adapters.lmcache_server import LmcacheServer
from swdriver_shim.daemon import metrics
from swdriver_shim.daemon.service import Service
from swdriver_shim.daemon.settings import Settings, parse
from swdriver_shim.daemon.shim import Shim
from telemetry.credentials import own_url
from telemetry.notify import notify

log = logging.getLogger("swdriver_shim")

FULL_COLLECTIONS: Final = 1_000_000  # after so many of the middle generation


def main(arguments: Sequence[str]) -> int:
    try:
        settings = parse(arguments, os.environ)
    except WrongSettings as error:
        sys.stderr.write(f"{error}\n")
        return daemon.EX_CONFIG
    set_up(settings.log_format, settings.name)
    daemon.use_all_descriptors()
    # A full collection with a million columns takes 0.2 s and finds nothing, since columns are freed by
    # reference counts. Young generations are collected as usual.
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
    try:
        return asyncio.run(_serve(settings))
    except (OSError, ValueError, native.Unavailable) as error:  # a port that is taken, for one
        sys.stderr.write(f"The driver cannot start: {error}\n")
        return 1


async def _serve(settings: Settings) -> int:
    native.build_in_background()
    stop = daemon.stop_signal()
    listener = daemon.listen(settings.control)
    listeners = [(org, daemon.listen(place)) for org, place in settings.lmcache]
    own = ProcessIdentity.load(settings.state_dir, f"driver:{settings.name}")
    trust = Trust.load(own)
    tls = trust.for_control if settings.serves_tls else None
    if not tls:
        warn_of_plain_control(settings.control)
    shim = Shim(
        settings.name,
        settings.state_dir,
        daemon.software(),
        trust=trust,
        transfer_bytes=settings.transfer_memory,
    )
    await asyncio.to_thread(shim.start)
    application = Service(shim, settings.token, own).application()
    fronts = {org: LmcacheServer(one, partial(shim.objects_of, org)) for org, one in listeners}
    shim.fronts = {org: front.counts for org, front in fronts.items()}
    reporter = daemon.reporting(
        own_url(settings.telemetry, own.topic, settings.token) if settings.telemetry else None,
        settings.otlp,
        "driver",
        settings.name,
        partial(metrics.collect, shim),
        shim.limits,
        shim.take_slowest,
    )
    identity = _identity(settings, trust, daemon.url_of(listener, tls))
    membership = member(settings.console, identity, shim.membership_status)
    server = daemon.http_server(application, listener, shim.http, tls)
    async with reporter, server, membership, daemon.watched():
        log.info("Listening on %s:%s", *listener.getsockname()[:2])
        await stop.wait()
        notify("STOPPING=1")
    for front in fronts.values():
        await asyncio.to_thread(front.stop)
    await asyncio.to_thread(shim.stop)
    log.info("Stopped")
    return 0


def _identity(settings: Settings, trust: Trust, url: str) -> JoiningProcess:
    """What the console is told about this process."""
    facts = {"control_url": settings.control_url or url, "software_version": daemon.version()}
    model = {"model": msgspec.to_builtins(settings.model)} if settings.model else {}
    once = {**model, "certificate_request": trust.identity.certificate_request()}
    topic = trust.identity.topic
    return JoiningProcess(
        "drivers", topic, settings.name, settings.token, facts, once, trust, is_new=settings.is_new
    )
