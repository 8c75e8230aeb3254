"""What surrounds a driver in its process, be that a daemon or an engine: identity, certificates, HTTP
API, membership in a console's fleet, and telemetry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import IO, Any, Final

import msgspec

from kvss_agent.process import daemon
from kvss_agent.process.membership import JoiningProcess, member
from kvss_agent.process.own_address import own_address
from kvss_agent.process.state_dir import locked
from kvss_agent.security.identity import ProcessIdentity
from kvss_agent.security.trust import Trust
from swdriver_shim.daemon import metrics
from swdriver_shim.daemon.service import Service
from swdriver_shim.daemon.settings import Settings
from swdriver_shim.daemon.shim import Shim
from telemetry.units import duration
from telemetry.version import tidegate_version

log = logging.getLogger(__name__)

RESTART_SECONDS: Final = 5.0  # after an end that nobody wanted


class DriverHost:
    """Everything around one driver. It listens from here on; requests wait until `running`."""

    def __init__(self, settings: Settings, lock: IO[bytes] | None = None) -> None:
        """`lock`: of the state directory, where the caller has taken it; it is freed at the end. Raises
        OSError, also for a port or a state directory that is taken, and Unusable for a damaged
        identity."""
        self.settings = settings
        with contextlib.ExitStack() as opened:  # a start that fails leaves nothing taken
            opened.enter_context(lock or locked(settings.state_dir))
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
            partial(self._publish_map, shim),
        )
        server = daemon.http_server(application, self.listener, shim.http, self._tls)
        async with telemetry, server, member(settings.console, self._joining(), status):
            log.info("Listening on %s:%s", *self.listener.getsockname()[:2])
            yield

    def _publish_map(self, shim: Shim, redis_url: str) -> daemon.Stoppable:
        """Report what is cached to brains. Raises ValueError for an address that can't be used."""
        # The client of Redis takes a while to load, and not every driver has a Redis.
        from swdriver_shim.cache_map.publisher import MapPublisher
        from swdriver_shim.cache_map.recall_reader import RecallReader

        topic = self.identity.topic
        publisher = MapPublisher(redis_url, topic, shim.follow_cache)
        recalls = RecallReader(redis_url, topic, shim.recall, shim.recalls)
        return _Together(publisher.start(), recalls.start())

    def _joining(self) -> JoiningProcess:
        """What the console is told about this process. The model of an engine can change between its
        starts, so it is told each time; that of a daemon is only proposed."""
        settings = self.settings
        model = {"model": msgspec.to_builtins(settings.model)} if settings.model else {}
        facts: Mapping[str, Any] = {"software_version": tidegate_version()}
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
            look_up=self._control_url,
        )

    def _control_url(self) -> Mapping[str, Any]:
        """Of an engine that did not know its address when it started: where it is reached by now."""
        settings, console = self.settings, self.settings.console
        if settings.control_url:
            return {"control_url": settings.control_url}
        is_engine = console is not None and settings.engine
        address = partial(own_address, console.url) if console and is_engine else socket.gethostname
        return {"control_url": daemon.url_of(self.listener, self._tls, address)}


class _Together:
    """What is stopped together."""

    def __init__(self, *parts: daemon.Stoppable) -> None:
        self._parts = parts

    def stop(self) -> None:
        for one in self._parts:
            one.stop()


class HostThread:
    """`DriverHost.running`, or `daemon.http_server`, in a thread of an engine's process.

    Should it end by itself, it is started again: the engine goes on without it, but by policies that
    nobody can change, and no purge reaches it.
    """

    def __init__(self, service: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Returns when it runs. Raises what its start raises."""
        self._service = service
        self._is_closed = threading.Event()
        self._started = Future[None]()
        self._thread = threading.Thread(target=self._run, name="tidegate-host", daemon=True)
        self._thread.start()
        self._started.result()

    def close(self) -> None:
        self._is_closed.set()
        with contextlib.suppress(RuntimeError):  # it is between two loops, and looks before the next
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._run_once()
            except (Exception, SystemExit) as error:
                if not self._started.done():
                    self._started.set_exception(error)
                    return
                log.exception(
                    "The driver's API, and what else runs beside it, has ended: the engine goes on as "
                    "it was told last. It is started again in %s",
                    duration(RESTART_SECONDS),
                )
                self._is_closed.wait(RESTART_SECONDS)

    def _run_once(self) -> None:
        """As `asyncio.run`, but for waiting until threads end that look up names."""
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
        finally:
            loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
            loop.close()

    async def _serve(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if self._is_closed.is_set():
            return
        async with self._service():
            if not self._started.done():
                self._started.set_result(None)
            await self._stop.wait()


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
