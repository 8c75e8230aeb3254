"""Carries out what `core` decides: one asyncio loop, one task per process, nothing polled but time."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from console.stack.core import Deed, Effect, State, Supervision
from console.stack.errors import StackError
from console.stack.logs import Logs
from console.stack.processes import (
    Notifications,
    Remembered,
    how_it_ended,
    lines,
    signal_group,
    spawn,
)
from console.stack.services import Service

TICK_SECONDS = 0.25
ASK_WHILE_STARTING_SECONDS = 0.05
ASK_WHILE_READY_SECONDS = 2.0
JITTER = 0.2


class Watcher(Protocol):
    """Who looks on: the display, or a test."""

    def changed(self, service: str, state: State, reason: str) -> None: ...
    def line(self, service: str, line: str) -> None: ...
    def prepared(self, fact: dict[str, Any]) -> None: ...
    def up(self) -> None: ...


class Supervisor:
    """Runs `services` until stopped. Whoever calls `run` holds the lock of the state directory."""

    def __init__(
        self,
        services: list[Service],
        *,
        environment: Mapping[str, str],
        run_directory: Path,
        logs: Logs,
        watcher: Watcher,
        web_socket: socket.socket | None = None,
    ) -> None:
        generator = random.Random()  # noqa: S311 - spreads restarts, keeps no secret
        self.core = Supervision(
            [service.spec for service in services],
            lambda: generator.uniform(1 - JITTER, 1 + JITTER),
        )
        self.services = {service.name: service for service in services}
        self.environment = environment
        self.remembered = Remembered(run_directory)
        self.run_directory = run_directory
        self.logs = logs
        self.watcher = watcher
        self.web_socket = web_socket
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._states: dict[str, State] = {}
        self._was_up = False
        self._failure = ""
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Until everything has stopped. Raises StackError where a step that has to succeed did not."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        self._do(self.core.start(time.monotonic()))
        ticker = asyncio.create_task(self._tick())
        try:
            await self._done.wait()
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, *self._tasks, return_exceptions=True)
        if self._failure:
            raise StackError(self._failure)

    def stop(self) -> None:
        """Stop in order; called again, at once."""
        self._do(self.core.stop(time.monotonic()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._do(self.core.on_tick(time.monotonic()))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            process = self.processes.get(effect.name)
            match effect.deed:
                case Deed.SPAWN:
                    self._in_background(self._live(self.services[effect.name]))
                case Deed.STOP if process:
                    signal_group(process.pid, self.services[effect.name].stop_signal, whole=False)
                case Deed.KILL if process:
                    signal_group(process.pid, signal.SIGKILL, whole=True)
        self._tell()

    def _tell(self) -> None:
        for name, service in self.core.services.items():
            if self._states.get(name) is not service.state:
                self._states[name] = service.state
                self.watcher.changed(name, service.state, service.reason)
        if self.core.all_up and not self._was_up:
            self._was_up = True
            self.watcher.up()
        failed = self.core.failed
        if failed and not self.core.stopping:
            last = self.logs.last_line(failed.spec.name)
            self._failure = f"“{failed.spec.name}” failed with {failed.reason}: {last}"
            self.stop()
        if self.core.stopping and self.core.all_down:
            self._done.set()

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, service: Service) -> None:
        """One life of one process, from its start to its end."""
        notifications = Notifications(
            self.run_directory, service.name, lambda line: self._heard(service.name, line)
        )
        environment = {**self.environment, "NOTIFY_SOCKET": notifications.address}
        try:
            process = await spawn(service, environment, self.web_socket)
        except OSError as error:
            notifications.close()
            self._do(self.core.on_exit(service.name, f"it can't be started: {error}", time.monotonic()))
            return
        self.processes[service.name] = process
        self.remembered.remember(service.name, process.pid)
        if self.core.stopping:  # it was told to stop before it was there to be told
            signal_group(process.pid, service.stop_signal, whole=False)
        asking = asyncio.create_task(self._ask(service)) if service.answers else None
        try:
            await asyncio.gather(*self._readers(service, process))
            code = await process.wait()
        finally:
            if asking:
                asking.cancel()
            notifications.close()
        signal_group(process.pid, signal.SIGKILL, whole=True)  # whatever it left of its own
        del self.processes[service.name]
        self.remembered.forget(service.name)
        how = how_it_ended(code)
        if code and not self.core.stopping:
            self._line(service.name, f"({how})")
        self._do(self.core.on_exit(service.name, how, time.monotonic(), success=code == 0))

    def _readers(self, service: Service, process: asyncio.subprocess.Process) -> list[Any]:
        readers = []
        if process.stdout:
            take = self._fact if service.spec.once else self._line
            readers.append(self._read(service.name, process.stdout, take))
        if process.stderr:
            readers.append(self._read(service.name, process.stderr, self._line))
        return readers

    async def _read(self, name: str, stream: asyncio.StreamReader, take: Any) -> None:
        async for line in lines(stream):
            take(name, line)

    def _line(self, name: str, line: str) -> None:
        self.logs.write(name, line)
        self.watcher.line(name, line)

    def _fact(self, name: str, line: str) -> None:
        """A step tells in JSON how it goes; that may be a password, so no log ever gets it."""
        try:
            fact = json.loads(line)
        except ValueError:
            self._line(name, line)
            return
        self.watcher.prepared(fact)

    def _heard(self, name: str, line: str) -> None:
        now = time.monotonic()
        if line == "READY=1":
            self._do(self.core.on_ready(name, now))
        elif line == "WATCHDOG=1":
            self.core.on_alive(name, now)

    async def _ask(self, service: Service) -> None:
        """Ask a server that does not tell by itself: often until it is ready, then now and then."""
        if service.answers is None:
            return
        while True:
            if await asyncio.to_thread(service.answers):
                now = time.monotonic()
                self._do(self.core.on_ready(service.name, now))
                self.core.on_alive(service.name, now)
            ready = self.core.services[service.name].state is State.READY
            await asyncio.sleep(ASK_WHILE_READY_SECONDS if ready else ASK_WHILE_STARTING_SECONDS)
