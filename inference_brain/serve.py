"""`python -m inference_brain serve`: one brain, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final

import uvloop

from inference_brain.api.listener import ApiServer, policy
from inference_brain.brain import Brain
from inference_brain.collection import collect
from inference_brain.control import Control
from inference_brain.picker.server import picking
from inference_brain.settings import Settings, parse
from kvss_agent.process import daemon
from kvss_agent.process.membership import JoiningProcess, member
from kvss_agent.process.state_dir import locked
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.security.trust import Trust
from telemetry.credentials import own_url, reader
from telemetry.garbage import collect_less
from telemetry.notify import notify
from telemetry.version import tidegate_version

log = logging.getLogger("inference_brain")

_MMAP_THRESHOLD: Final = -3  # as malloc.h numbers them
_TRIM_THRESHOLD: Final = -1
RETRY_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 60.0  # beyond what a replica is given, for the answer to be taken
SWITCH_SECONDS: Final = 0.0005


def main(arguments: Sequence[str]) -> int:
    _keep_freed_memory()
    # While a thread adds up the numbers of a second, the event loop waits so long for the interpreter,
    # each time that it has let it go; by default ten times as long.
    sys.setswitchinterval(SWITCH_SECONDS)
    return daemon.run("The brain", parse, _serve, arguments, uvloop.new_event_loop)


def _keep_freed_memory() -> None:
    """Let freed memory of bodies be used again. By default glibc takes what is longer than 128 KiB from
    the kernel each time, page by page: that costs more than all else that is done with a long prompt."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_TRIM_THRESHOLD, 256 << 20)


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
        bounds = policy(
            settings.connections, settings.options.patience.whole + GRACE_SECONDS, brain.owners
        )
        listeners = [ApiServer(brain.api, public, bounds, settings.certificate, settings.key)]
        if settings.trusted and brain.trusted_api:
            private = opened.enter_context(daemon.listen(settings.trusted[1]))
            listeners.append(ApiServer(brain.trusted_api, private, bounds))
        tls = trust.for_control if settings.serves_tls else None
        application = Control(brain, settings.token, identity).application()
        url = settings.control_url or daemon.url_of(control, tls)
        api_url = daemon.url_of(public)
        if settings.certificate:
            api_url = f"https{api_url.removeprefix('http')}"
        joining = _joining(settings, identity, trust, {"control_url": url, "api_url": api_url})
        status = brain.membership_status
        opened.callback(_following_redis(settings, identity.topic, brain).cancel)
        for context in (
            daemon.reporting(
                settings, "brain", identity.topic, partial(collect, brain), brain.counts.limits, status
            ),
            daemon.http_server(application, control, brain.http, tls),
            member(settings.console, joining, status),
            _left_at_once(
                *(one.running() for one in listeners),
                *([picking(brain.for_gateways, settings.picker)] if settings.picker else []),
            ),
        ):
            await opened.enter_async_context(context)
        places = (*public.getsockname()[:2], *control.getsockname()[:2])
        log.info("Listening on %s:%s, control API on %s:%s", *places)
        collect_less()
        async with daemon.watched():
            await stop.wait()
            notify("STOPPING=1")
    log.info("Stopped")
    return 0


@contextlib.asynccontextmanager
async def _left_at_once(*contexts: AbstractAsyncContextManager[object]) -> AsyncIterator[None]:
    """Enters them one by one, and leaves all of them at once: no listener takes connections while
    another one finishes its answers, also where leaving one fails."""
    entered: list[AbstractAsyncContextManager[object]] = []
    try:
        for one in contexts:
            await one.__aenter__()
            entered.append(one)
        yield
    finally:
        leaving = (one.__aexit__(None, None, None) for one in entered)
        for failed in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(failed, BaseException):
                raise failed


def _following_redis(settings: Settings, topic: str, brain: Brain) -> asyncio.Task[None]:
    """What brains share is in the Redis that takes telemetry, which the console may name."""

    async def follow() -> None:
        url = settings.telemetry
        status = brain.membership_status
        while True:
            if not url:
                await status.has_telemetry.wait()
                url = status.telemetry_url
            try:
                return brain.use_redis(
                    own_url(url, topic, settings.token), own_url(url, reader(topic), settings.token)
                )
            except ValueError as error:
                log.warning("What brains share has no address that can be used: %s", error)
                url = None
                await asyncio.sleep(RETRY_SECONDS)

    return asyncio.create_task(follow(), name="redis")


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
