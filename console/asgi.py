"""The ASGI application: pages, API and static files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, cast

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

from django.core.asgi import get_asgi_application

django_application = get_asgi_application()

from channels.routing import ProtocolTypeRouter
from django.conf import settings
from django.template import engines
from django.urls import resolve, reverse
from servestatic import ServeStaticASGI

from console.api.middleware import ADDRESSES
from console.guard import Guard
from console.live.consumer import COUNTS, websockets
from console.metrics import prometheus
from console.shell.view_modules import View, named_views
from telemetry.emit.reporter import Reporter
from telemetry.garbage import collect_less
from telemetry.metrics import Sink
from telemetry.notify import notify
from telemetry.store import history

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

WATCHDOG_SECONDS = 1.0
FIRST_PAGES = ("login", "home")  # for whoever waits for the console to be back


async def lifespan(_scope: Scope, receive: Receive, send: Send) -> None:
    """Tell the supervisor when we are ready, and that the event loop still turns."""
    await receive()
    _settle_down()
    reporter = Reporter(
        settings.TELEMETRY_URL,
        settings.OTLP_URL,
        "web",
        settings.VERSION,
        collect=_collect,
        also=prometheus.collect,
    )
    await send({"type": "lifespan.startup.complete"})
    watchdog = asyncio.create_task(_watchdog()) if notify("READY=1") else None
    rest = asyncio.create_task(asyncio.to_thread(_load_the_rest))
    await receive()
    notify("STOPPING=1")
    await rest
    if watchdog:
        watchdog.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watchdog
    await asyncio.to_thread(reporter.stop)
    await send({"type": "lifespan.shutdown.complete"})


def _collect(into: Sink) -> None:
    COUNTS.collect(into)
    GUARD.collect(into)
    history.OF_THIS_PROCESS.collect(into)


def _settle_down() -> None:
    """Load what the first request needs. What is loaded by now stays: to look through it all for garbage
    took 150 ms of a request."""
    for page in FIRST_PAGES:
        view = resolve(reverse(page)).func
        if isinstance(view, View):
            view.load()
    engines.all()  # with the tags of all templates
    collect_less()


def _load_the_rest() -> None:
    """All pages, and the API. Pages are served meanwhile: what a request needs that comes earlier, it
    loads, or waits for. That all can be loaded `prepare` has checked; where one can't here, its own
    requests fail, and no others."""
    for module in dict.fromkeys([*(view.__module__ for view in named_views()), ADDRESSES]):
        try:
            import_module(module)
        except Exception:
            log.exception("%s can't be loaded: requests for what is in it fail", module)
    collect_less()


async def _watchdog() -> None:
    while True:
        await asyncio.sleep(WATCHDOG_SECONDS)
        notify("WATCHDOG=1")


GUARD = Guard(cast("Application", django_application))
application: Application = ProtocolTypeRouter(
    {
        "lifespan": lifespan,
        "http": ServeStaticASGI(GUARD, root=settings.STATIC_ROOT, prefix=settings.STATIC_URL),
        "websocket": websockets,
    }
)
