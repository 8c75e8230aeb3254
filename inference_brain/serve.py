"""`python -m inference_brain serve`: one brain, until SIGTERM."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from inference_brain.api.listener import ApiServer
from inference_brain.brain import Brain
from inference_brain.control import Control
from inference_brain.settings import Settings, parse
from kvss_agent.process import daemon
from kvss_agent.process.membership import JoiningProcess, member
from kvss_agent.process.state_dir import locked
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.security.trust import Trust
from telemetry.notify import notify
from telemetry.version import tidegate_version

log = logging.getLogger("inference_brain")


def main(arguments: Sequence[str]) -> int:
    return daemon.run("The brain", parse, _serve, arguments)


async def _serve(settings: Settings) -> int:
    stop = daemon.stop_signal()
    settings.warn_of_plain_control()
    async with contextlib.AsyncExitStack() as opened:
        opened.enter_context(locked(settings.state_dir))
        control = opened.enter_context(daemon.listen(settings.control))
        public = opened.enter_context(daemon.listen(settings.listen))
        identity = ProcessIdentity.load(settings.state_dir, f"brain:{settings.name}")
        trust = Trust.load(identity)
        brain = Brain(
            settings.name,
            settings.state_dir,
            daemon.software(),
            token=settings.token,
            options=settings.options,
        )
        await opened.enter_async_context(brain.running())
        listeners = [
            ApiServer(brain.api, public, settings.connections, settings.certificate, settings.key)
        ]
        if settings.trusted and brain.trusted_api:
            private = opened.enter_context(daemon.listen(settings.trusted[1]))
            listeners.append(ApiServer(brain.trusted_api, private, settings.connections))
        tls = trust.for_control if settings.serves_tls else None
        application = Control(brain, settings.token, identity).application()
        url = settings.control_url or daemon.url_of(control, tls)
        joining = _joining(settings, identity, trust, {"control_url": url})
        status = brain.membership_status
        for context in (
            daemon.reporting(
                settings, "brain", identity.topic, brain.collect, brain.counts.limits, status
            ),
            daemon.http_server(application, control, brain.http, tls),
            member(settings.console, joining, status),
            *(one.running() for one in listeners),
        ):
            await opened.enter_async_context(context)
        log.info("Listening on %s:%s, control on %s:%s", *settings.listen, *settings.control)
        async with daemon.watched():
            await stop.wait()
            notify("STOPPING=1")
    log.info("Stopped")
    return 0


def _joining(
    settings: Settings, identity: ProcessIdentity, trust: Trust, facts: Mapping[str, Any]
) -> JoiningProcess:
    """What the console is told about this process."""
    return JoiningProcess(
        "brains",
        identity.topic,
        settings.name,
        settings.token,
        {**facts, "software_version": tidegate_version()},
        {"certificate_request": identity.certificate_request()},
        trust,
        is_new=settings.is_new,
    )
