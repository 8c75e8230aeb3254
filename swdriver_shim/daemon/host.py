"""What surrounds a driver in its process, be that a daemon or an engine: identity, certificates, HTTP
API, membership in a console's fleet, and telemetry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import msgspec

from kvss_agent.process import daemon
from kvss_agent.process.membership import JoiningProcess, member
from kvss_agent.process.state_dir import locked
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.security.trust import Trust
from swdriver_shim.cache_map.publisher import MapPublisher
from swdriver_shim.daemon import metrics
from swdriver_shim.daemon.service import Service
from swdriver_shim.daemon.settings import Settings
from swdriver_shim.daemon.shim import Shim
from telemetry.version import tidegate_version

log = logging.getLogger(__name__)


class DriverHost:
    """Everything around one driver. It listens from here on; requests wait until `running`."""

    def __init__(self, settings: Settings) -> None:
        """Raises OSError, also for a port or a state directory that is taken, and Unusable for a damaged
        identity."""
        self.settings = settings
        with contextlib.ExitStack() as opened:  # a start that fails leaves nothing taken
            opened.enter_context(locked(settings.state_dir))
            self.listener = opened.enter_context(daemon.listen(settings.control))
            self.identity = ProcessIdentity.load(settings.state_dir, f"driver:{settings.name}")
            self.trust = Trust.load(self.identity)
            self._opened = opened.pop_all()
        self._tls = self.trust.for_control if settings.serves_tls else None
        settings.warn_of_plain_control()

    def close(self) -> None:
        """Another process may use the state directory from here on."""
        self._opened.close()

    @contextlib.asynccontextmanager
    async def running(self, shim: Shim) -> AsyncIterator[None]:
        """Serve the API of this driver, be a member of the fleet, and report telemetry."""
        settings, status = self.settings, shim.membership_status
        application = Service(shim, settings.token, self.identity).application()
        telemetry = daemon.reporting(
            settings,
            "driver",
            self.identity.topic,
            partial(metrics.collect, shim),
            shim.limits,
            status,
            shim.take_slowest,
            lambda address: MapPublisher(address, self.identity.topic, shim.follow_cache).start(),
        )
        server = daemon.http_server(application, self.listener, shim.http, self._tls)
        async with telemetry, server, member(settings.console, self._joining(), status):
            log.info("Listening on %s:%s", *self.listener.getsockname()[:2])
            yield

    def _joining(self) -> JoiningProcess:
        """What the console is told about this process. The model of an engine can change between its
        starts, so it is told each time; that of a daemon is only proposed."""
        settings = self.settings
        url = settings.control_url or daemon.url_of(self.listener, self._tls)
        model = {"model": msgspec.to_builtins(settings.model)} if settings.model else {}
        facts: Mapping[str, Any] = {"control_url": url, "software_version": tidegate_version()}
        once: Mapping[str, Any] = {"certificate_request": self.identity.certificate_request()}
        if settings.engine:
            facts = {**facts, **model, "engine": settings.engine}
        else:
            once = {**once, **model}
        return JoiningProcess(
            "drivers",
            self.identity.topic,
            settings.name,
            settings.token,
            facts,
            once,
            self.trust,
            is_new=settings.is_new,
        )


class HostThread:
    """`DriverHost.running`, or `daemon.http_server`, in a thread of an engine's process."""

    def __init__(self, service: AbstractAsyncContextManager[None]) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(service,), name="tidegate-host", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended by an error, which is logged
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, service: AbstractAsyncContextManager[None]) -> None:
        try:
            self._loop.run_until_complete(self._serve(service))
        except Exception:
            log.exception("The driver's API, and what else runs beside it, has ended")
        finally:
            self._loop.close()

    async def _serve(self, service: AbstractAsyncContextManager[None]) -> None:
        async with service:
            await self._stop.wait()
