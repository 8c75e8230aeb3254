"""`python -m kvss_agent`: one agent, until SIGTERM. See `--help`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial

from kvss_agent import daemon, metrics
from kvss_agent.agent import Agent
from kvss_agent.control import Control
from kvss_agent.logs import set_up
from kvss_agent.options import WrongSettings
from kvss_agent.settings import Settings, parse
from telemetry.notify import notify

log = logging.getLogger("kvss_agent")


def main() -> int:
    try:
        settings = parse(sys.argv[1:], os.environ)
    except WrongSettings as error:
        sys.stderr.write(f"{error}\n")
        return daemon.EX_CONFIG
    set_up(settings.log_format, settings.name)
    daemon.use_all_descriptors()
    try:
        return asyncio.run(_serve(settings))
    except (OSError, ValueError) as error:  # a port or path that is taken, a certificate that is none
        sys.stderr.write(f"The agent cannot start: {error}\n")
        return 1


async def _serve(settings: Settings) -> int:
    stop = daemon.stop_signal()
    listener = daemon.listen(settings.control)
    agent = Agent(settings, daemon.software())
    await agent.start()
    telling = daemon.telling(
        settings.telemetry, "agent", settings.name, partial(metrics.collect, agent), agent.limits
    )
    async with telling, daemon.serving(Control(agent).application(), listener), daemon.watched():
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
    log.info("Stopped; %s", "everybody had left" if gone else "some connections were closed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
