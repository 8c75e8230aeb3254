"""Carries out what `core` decides: one asyncio loop, one task per process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

from console.stack import snapshot
from console.stack.core import Deed, Effect, State, Supervision
from console.stack.core import Service as Watched
from console.stack.errors import StackError
from console.stack.logs import Logs
from console.stack.processes import Child, Notifications, how_it_ended, lines, spawn
from console.stack.remembered import Remembered
from console.stack.services import Service

TICK_SECONDS = 0.5  # at most, and until the next deadline
ASK_WHILE_STARTING_SECONDS = 0.05
ASK_WHILE_READY_SECONDS = 2.0
JITTER = 0.2
LAST_LINES = 10


class Watcher(Protocol):
    """Who looks on: the display, or a test."""

    def changed(self, service: Watched, last_lines: list[str]) -> None: ...
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
        status_file: Path,
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
        self.status_file = status_file
        self.logs = logs
        self.watcher = watcher
        self.web_socket = web_socket
        self.children: dict[str, Child] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seen: dict[str, State] = {}
        self._was_up = False
        self._failure: BaseException | None = None
        self._done = asyncio.Event()
        self._decided = asyncio.Event()  # deadlines may be others

    async def run(self) -> None:
        """Until everything has stopped. StackError where something that has to succeed did not."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup: it is to outlive its terminal
            loop.add_signal_handler(number, self.stop)
        self._do(self.core.start(time.monotonic()))
        ticker = asyncio.create_task(self._tick())
        ticker.add_done_callback(self._over)
        try:
            await self._done.wait()
        finally:
            ticker.cancel()
            for child in self.children.values():
                child.kill_session()  # none are left, unless a fault of our own ended the wait
            await asyncio.gather(ticker, *self._tasks, return_exceptions=True)
        if self._failure:
            raise self._failure

    def stop(self) -> None:
        """Stop in order; called again, in a hurry."""
        self._do(self.core.stop(time.monotonic()))

    async def _tick(self) -> None:
        while True:
            self._do(self.core.on_tick(time.monotonic()))
            self._decided.clear()
            pause = min(TICK_SECONDS, self.core.next_deadline - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._decided.wait()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            child = self.children.get(effect.name)
            match effect.deed:
                case Deed.SPAWN:
                    self._in_background(self._live(self.services[effect.name]))
                case Deed.STOP if child:
                    child.signal(self.services[effect.name].stop_signal)
                case Deed.KILL if child:
                    child.kill_session()
        self._decided.set()
        self._tell()

    def _tell(self) -> None:
        changed = False
        for name, service in self.core.services.items():
            if self._seen.get(name) is not service.state:
                self._seen[name] = service.state
                self.watcher.changed(service, self.logs.last_lines(name)[-LAST_LINES:])
                changed = True
        if changed:
            self._write_status()
        if self.core.all_up and not self._was_up:
            self._was_up = True
            self.watcher.up()
        failed = self.core.failed
        if failed and not self.core.stopping:
            last = "\n".join(self.logs.last_lines(failed.spec.name)[-LAST_LINES:])
            sentence = f"“{failed.spec.name}” can't start ({failed.reason}):\n{last}"
            self._failure = StackError(sentence)
            self.stop()
        if self.core.stopping and self.core.all_down:
            self._done.set()

    def _write_status(self) -> None:
        epoch = time.time() - time.monotonic()
        snapshot.write(
            self.status_file,
            [
                snapshot.Row(
                    name=name,
                    state=service.state.value,
                    since=epoch + service.since,
                    restarts=service.restarts,
                    reason=service.reason,
                    pid=self.children[name].pid if name in self.children else None,
                )
                for name, service in self.core.services.items()
            ],
        )

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """What ends in an exception is our fault, and the end of all: better than half a supervisor."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            self._failure = task.exception()
            self._done.set()

    async def _live(self, service: Service) -> None:
        """One life of one process, from its start to its end."""
        name = service.name
        with contextlib.ExitStack() as until_it_ends:
            try:
                if service.tidy:
                    await asyncio.to_thread(service.tidy)
                environment = {**self.environment, **self._told(service, until_it_ends)}
                child = await spawn(service, environment, self.web_socket)
            except (OSError, StackError) as error:
                self._line(name, f"It can't be started: {error}")
                self._do(self.core.on_exit(name, str(error), time.monotonic()))
                return
            self.children[name] = child
            self.remembered.remember(name, child.pid, service.stop_signal)
            self._write_status()  # it may have said already that it is ready
            self._catch_up(service, child)
            if service.answers:
                asking = asyncio.create_task(self._ask(service, service.answers))
                asking.add_done_callback(self._over)
                until_it_ends.callback(asking.cancel)
            code = await child.end(*self._readers(service, child))
        del self.children[name]
        self.remembered.forget(name)
        how = how_it_ended(code)
        self._do(self.core.on_exit(name, how, time.monotonic(), success=code == 0))

    def _told(self, service: Service, until_it_ends: contextlib.ExitStack) -> dict[str, str]:
        """What a process has to know to tell of itself; one that is asked has nothing to tell."""
        if service.answers:
            return {}
        name = service.name
        listener = Notifications(self.run_directory, name, lambda line: self._heard(name, line))
        until_it_ends.callback(listener.close)
        watchdog = service.spec.watchdog_seconds
        told = {"WATCHDOG_USEC": str(int(watchdog * 1e6))} if watchdog else {}
        return {**told, "NOTIFY_SOCKET": listener.address}

    def _catch_up(self, service: Service, child: Child) -> None:
        """Do what was decided while the process was on its way and could not be told."""
        watched = self.core.services[service.name]
        if watched.killed_because:
            child.kill_session()
        elif watched.state is State.STOPPING:
            child.signal(service.stop_signal)

    def _readers(self, service: Service, child: Child) -> list[asyncio.Task[None]]:
        take = self._fact if service.spec.once else self._line
        readers = [self._read(service.name, child.output, take)]
        if child.errors:
            readers.append(self._read(service.name, child.errors, self._line))
        return [asyncio.create_task(reader) for reader in readers]

    async def _read(
        self, name: str, stream: asyncio.StreamReader, take: Callable[[str, str], None]
    ) -> None:
        async for line in lines(stream):
            take(name, line)

    def _line(self, name: str, line: str) -> None:
        self.logs.write(name, line)
        self.watcher.line(name, line)

    def _fact(self, name: str, line: str) -> None:
        """A step tells in JSON how it goes; that may be a password, so no log ever gets it."""
        fact = None
        with contextlib.suppress(ValueError):
            fact = json.loads(line)
        if isinstance(fact, dict):
            self.watcher.prepared(fact)
        else:
            self._line(name, line)

    def _heard(self, name: str, line: str) -> None:
        now = time.monotonic()
        if line == "READY=1":
            self._do(self.core.on_ready(name, now))
        elif line == "WATCHDOG=1":
            self.core.on_alive(name, now)

    async def _ask(self, service: Service, answers: Callable[[], bool]) -> None:
        """Ask a server that does not tell by itself: often until it is ready, then now and then.
        One that is stopping is left alone: PostgreSQL logs each question as a failure."""
        watched = self.core.services[service.name]
        while watched.state is not State.STOPPING:
            if await asyncio.to_thread(answers):
                now = time.monotonic()
                self._do(self.core.on_ready(service.name, now))
                self.core.on_alive(service.name, now)
            ready = watched.state is State.READY
            await asyncio.sleep(ASK_WHILE_READY_SECONDS if ready else ASK_WHILE_STARTING_SECONDS)
