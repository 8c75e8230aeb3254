"""`python -m kvss_agent`: one agent, until SIGTERM. See `--help`."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial

from kvss_agent import metrics, native
from kvss_agent.agent import Agent
from kvss_agent.control import Control
from kvss_agent.data_plane import constants
from kvss_agent.data_plane.address import Address
from kvss_agent.process import daemon
from kvss_agent.process.membership import JoiningProcess, member
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.security.trust import Trust
from kvss_agent.settings import Settings, parse
from kvss_agent.shard.arena import available_bytes
from telemetry.garbage import collect_less
from telemetry.notify import notify
from telemetry.version import tidegate_version

log = logging.getLogger("kvss_agent")


def main() -> int:
    return daemon.run("The agent", parse, _serve, sys.argv[1:])


async def _serve(settings: Settings) -> int:
    native.build_in_background()
    stop = daemon.stop_signal()
    listener = daemon.listen(settings.control)
    own = ProcessIdentity.load(settings.state_dir, f"node:{settings.name}")
    trust = Trust.load(own)
    tls = trust.for_control if settings.serves_tls else None
    settings.warn_of_plain_control()
    agent = Agent(settings, daemon.software(), trust, end=stop.set)
    memory_bytes = settings.memory_bytes or available_bytes()
    await agent.start()
    status, collect = agent.membership_status, partial(metrics.collect, agent)
    reporter = daemon.reporting(settings, "agent", own.topic, collect, agent.limits, status)
    identity = _identity(agent, trust, daemon.url_of(listener, tls), memory_bytes)
    membership = member(settings.console, identity, status)
    server = daemon.http_server(Control(agent, own).application(), listener, agent.http, tls)
    collect_less()
    async with reporter, server, membership, daemon.watched():
        log.info(
            "Listening: drivers on %s%s, control on %s:%s",
            settings.unix,
            f" and {settings.tcp[0]}:{agent.tcp_port}" if settings.tcp else "",
            *listener.getsockname()[:2],
        )
        await stop.wait()
        notify("STOPPING=1")
        log.info("Draining, at most %g s", settings.drain_seconds)
        gone = await agent.stop(settings.drain_seconds)
    log.info("Stopped; %s", "all connections had ended" if gone else "closed the remaining connections")
    return 1 if agent.is_broken else 0


def _identity(agent: Agent, trust: Trust, url: str, memory_bytes: int) -> JoiningProcess:
    """What the console learns of us."""
    settings = agent.settings
    facts = {
        "control_url": settings.control_url or url,
        "data_address": settings.data_address or str(_data_address(agent)),
        "software_version": tidegate_version(),
        "protocol_min": constants.VERSION_MIN,
        "protocol_max": constants.VERSION,
        "memory_bytes": memory_bytes,
        "cpus": len(os.sched_getaffinity(0)),
    }
    nics = [{"name": nic, "leaf": leaf} for nic, leaf in settings.nics]
    once = {"nics": nics, "certificate_request": trust.identity.certificate_request()}
    topic = trust.identity.topic
    return JoiningProcess(
        "nodes", topic, settings.name, settings.token, facts, once, trust, is_new=settings.is_new
    )


def _data_address(agent: Agent) -> Address:
    """What drivers connect to: over the network if we listen there."""
    if agent.settings.tcp is None:
        return Address(path=str(agent.settings.unix))
    host = daemon.host_for_others(agent.settings.tcp[0])
    return Address(host=host, port=agent.tcp_port, is_tls=agent.settings.has_tls_of_console)
