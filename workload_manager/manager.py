"""The manager of one instance: it does what `state.Instance` orders, and tells it what happens.

All of it is on one event loop. Whatever happens becomes a fact, `_take` learns it and carries out the
orders that follow, and then says how the instance is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvss_agent.http.client import Client, Timeouts, UpstreamFailed
from kvss_agent.http.server import HttpPolicy
from kvss_agent.limits.admission import Places
from kvss_agent.process import daemon
from kvss_agent.process.durable_file import write_durably
from kvss_agent.process.folder_watch import FolderWatch
from kvss_agent.process.state_dir import locked
from swdriver_shim.adapters.handover import CacheState, Handover
from swdriver_shim.adapters.handover import Goal as DriverGoal
from swdriver_shim.adapters.join_config import JoinConfig
from telemetry.notify import notify
from workload_manager import left_drivers, preparation, state, status
from workload_manager.engine_process import EngineProcess, kill_all
from workload_manager.engines import LAUNCH
from workload_manager.engines.base import CannotStart, Given, Launch
from workload_manager.proxy import ANSWER_SECONDS, Proxy, policy
from workload_manager.settings import Settings
from workload_manager.single_flight import Cancelled
from workload_manager.spec import InstanceSpec, Secrets
from workload_manager.state import Goal, Instance, State

log = logging.getLogger(__name__)

SOCKET: Final = "manager.sock"
GOAL: Final = "goal"
PLAIN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # an engine can write there
JOIN: Final = "join"
HANDOVER: Final = "driver"
DRIVERS: Final = "drivers"
LOOK_SECONDS: Final = 0.2  # between looks at the goal, where the folder can't be watched
LOOK_SECONDS_MAX: Final = 5.0  # where it can: on some file systems others' changes are not told
STARTING_SECONDS: Final = 0.1  # between probes of an engine that starts
PROBE_SECONDS: Final = 5.0  # of one that serves; and how long one may take
SILENT_SECONDS: Final = 1.0  # after a probe that failed
CONNECT_SECONDS: Final = 2.0
GOAL_BYTES_MAX: Final = 64


class Manager:
    def __init__(self, settings: Settings, spec: InstanceSpec, secrets: Secrets) -> None:
        self.settings = settings
        self.spec = spec
        self.secrets = secrets
        self.handover = Handover(settings.folder / HANDOVER) if spec.cache else None
        self.instance = Instance(
            state.Rules(
                has_cache=spec.cache is not None,
                start_seconds=spec.engine.start_seconds,
                grace_seconds=spec.grace_seconds,
            ),
            time.monotonic(),
        )
        self.proxy = Proxy(secrets.api_key, lambda count: self._take(state.RequestsRunning(count)))
        self._since: tuple[State, str, float] = (State.PENDING, "", time.time())
        self._progress: status.Progress | None = None
        self._url = ""
        self.board = status.Board(self._status())
        self._folders = preparation.Folders()
        self._preparing: asyncio.Task[None] | None = None
        self._stop_preparing = threading.Event()
        self._engine: tuple[int, EngineProcess] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: Client | None = None
        self._origin = ""
        self._timer: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Until the instance is gone. Raises OSError where it can't begin: another manager has the
        folder, or the port is taken. Raises what a part of its work has failed with that nobody has
        foreseen: another manager begins anew, where this one would wait for ever."""
        os.chdir(self.settings.folder)  # paths of sockets are short, and others' paths can be long
        with contextlib.ExitStack() as opened:
            opened.enter_context(locked(self.settings.folder))
            listener = opened.enter_context(daemon.listen(self.settings.listen))
            own = opened.enter_context(_listen_here(SOCKET))
            self._url = daemon.url_of(listener)
            quiet = HttpPolicy(places=Places(256, 256, 256, 16))
            async with (
                daemon.http_server(self.proxy, listener, policy()),  # type: ignore[arg-type]
                daemon.http_server(status.application(self.board), own, quiet),
                self._beside(self._follow_goal()),
                self._beside(self._delete_left_drivers()),
                daemon.watched(),
            ):
                log.info(
                    "Instance %s of %s takes requests at %s",
                    self.spec.instance,
                    self.spec.model,
                    self._url,
                )
                self._carry_out(self.instance.begin())
                await self._gone.wait()
                notify("STOPPING=1")
                self.board.end()
                os.unlink(SOCKET)  # noqa: PTH108 - a name in the folder that we are in, it takes no time
            await self._end_tasks()
        if self._failure:
            raise self._failure
        log.info("Gone")

    def drain(self) -> None:
        self._take(state.GoalSet(Goal.DRAIN))

    # Facts and orders

    def _take(self, fact: state.Fact) -> None:
        self._carry_out(self.instance.take(fact, time.monotonic()))

    def _carry_out(self, orders: list[state.Order]) -> None:
        for order in orders:
            match order:
                case state.Prepare():
                    self._stop_preparing.clear()
                    self._preparing = self._begin(self._prepare())
                case state.StopPreparing():
                    self._stop_preparing.set()
                    if self._preparing:
                        self._preparing.cancel()
                case state.StartEngine(run):
                    self._begin(self._run_engine(run))
                case state.EndEngine(run, kill):
                    self.proxy.cut_off()
                    if self._engine and self._engine[0] == run:
                        self._engine[1].end(kill=kill)
                case state.HoldCache(attach):
                    if self.handover:
                        self.handover.set_goal(DriverGoal.ATTACH if attach else DriverGoal.RELEASE)
        self._say()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()):
            self._failure = self._failure or failure
            self._gone.set()

    def _say(self) -> None:
        """What follows from the state, for clients, for the Cluster Server and for the clock."""
        instance = self.instance
        if instance.takes_requests and self._client:
            self.proxy.point_at(self._client, self._origin)
        else:
            self.proxy.point_nowhere(
                f"The engine takes no requests now ({instance.state}: {instance.reason})."
            )
        self.board.put(self._status())
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if instance.state is State.GONE:
            self._gone.set()
        elif (due := instance.next_look()) is not None:
            seconds = max(0.0, due - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._take, state.TimePassed())

    def _status(self) -> status.Status:
        instance, spec = self.instance, self.spec
        if (instance.state, instance.reason) != self._since[:2]:
            self._since = instance.state, instance.reason, time.time()
            if instance.state not in (State.COMPILING, State.LOADING):
                self._progress = None
            log.info("%s, %s: %s", instance.state, instance.reason, instance.sentence)
        return status.Status(
            name=spec.instance,
            replica=spec.replica,
            revision=spec.revision,
            state=instance.state.value,
            reason=instance.reason,
            sentence=instance.sentence,
            since=self._since[2],
            goal=instance.goal.value,
            url=self._url if instance.answers else "",
            cache=self._cache(),
            progress=self._progress,
            restarts=instance.restarts,
            running_requests=instance.running,
            boxes=spec.boxes,
            pid=os.getpid(),
        )

    def _cache(self) -> str:
        if not self.spec.cache:
            return "none"
        return (self.instance.cache or CacheState.WAITING).value

    # Preparing

    async def _prepare(self) -> None:
        loop = asyncio.get_running_loop()

        def report(step: state.Preparing, progress: status.Progress | None) -> None:
            loop.call_soon_threadsafe(self._learn_step, step, progress)

        try:
            await kill_all(self.settings.folder)  # an earlier manager may have been killed
            self._folders = await asyncio.to_thread(
                preparation.prepare,
                self.spec,
                self.secrets,
                self.settings.stores,
                report,
                self._stop_preparing,
            )
        except Cancelled:
            return  # by us: it is drained
        except preparation.Unprepared as error:
            self._take(state.NotPrepared(error.reason, str(error)))
        except OSError as error:
            self._take(state.NotPrepared("PreparationFailed", f"The engine can't be prepared: {error}."))
        else:
            self._take(state.Prepared())

    def _learn_step(self, step: state.Preparing, progress: status.Progress | None) -> None:
        self._progress = progress
        self._take(step)

    # The engine

    async def _run_engine(self, run: int) -> None:
        """From its start to its end."""
        try:
            await kill_all(self.settings.folder)
            launch = LAUNCH[self.spec.engine.kind](self._given())
            if launch.socket:
                launch.socket.unlink(missing_ok=True)
            if self.handover:
                self.handover.forget_state()
            process = await EngineProcess.start(launch, self.settings.folder)
        except CannotStart as error:
            self._take(state.EngineEnded(run, str(error)))
            return
        except OSError as error:
            self._take(state.EngineEnded(run, f"The engine can't be started: {error}."))
            return
        self._engine = run, process
        if self._must_end(run):
            process.end(kill=True)
        self._client = Client(
            Timeouts(CONNECT_SECONDS, ANSWER_SECONDS, ANSWER_SECONDS), unix=launch.socket
        )
        self._origin = launch.origin
        beside = [self._begin(self._probe(run, launch, process)), self._begin(self._follow_driver(run))]
        try:
            how = await _until_all_is_gone(process)
        finally:
            for task in beside:
                task.cancel()
            self._engine = None
            client, self._client = self._client, None
            await client.close()
        self._take(state.EngineEnded(run, how))

    def _must_end(self, run: int) -> bool:
        """Whether it was told to end before it had a process."""
        engine = self.instance.engine
        return engine is None or engine.run != run or engine.ends_why is not None

    def _given(self) -> Given:
        return Given(
            spec=self.spec,
            folder=self.settings.folder,
            programs=self.settings.programs,
            port=_free_port(),
            stop_seconds=self.instance.rules.stop_seconds,
            weights=self._folders.weights,
            tokenizer=self._folders.tokenizer,
            join=self._join(),
        )

    def _join(self) -> JoinConfig | None:
        """How the driver in the engine joins. Raises OSError."""
        cache, folder = self.spec.cache, self.settings.folder
        if cache is None:
            return None
        state_dir = self.settings.state_dir / DRIVERS / cache.driver
        left_drivers.note_console(state_dir, cache.console, cache.ca)
        if self.secrets.join_token:
            write_durably(folder / JOIN, self.secrets.join_token.encode())
        return JoinConfig(
            console=cache.console,
            name=cache.driver,
            join=str(folder / JOIN) if self.secrets.join_token else None,
            ca=cache.ca,
            plain_console=cache.plain_console,
            telemetry=cache.telemetry,
            state_dir=str(state_dir),
            handover=str(folder / HANDOVER),
        )

    async def _probe(self, run: int, launch: Launch, process: EngineProcess) -> None:
        """Ask again and again whether it answers, and not somebody else who has got its port."""
        client = Client(Timeouts(CONNECT_SECONDS, PROBE_SECONDS, PROBE_SECONDS), unix=launch.socket)
        port = None if launch.socket else urlsplit(launch.origin).port
        try:
            while True:
                is_there, stranger = await _answers(client, launch.origin + launch.probe), ""
                if is_there and port and not self.instance.answers:
                    stranger = await asyncio.to_thread(process.stranger_at, port)
                    is_there = not stranger
                if is_there and not self.instance.answers:
                    process.forget_start()
                self._take(state.EngineAnswers(run) if is_there else state.EngineSilent(run, stranger))
                if not self.instance.answers:
                    seconds = STARTING_SECONDS
                else:
                    seconds = PROBE_SECONDS if is_there else SILENT_SECONDS
                await asyncio.sleep(seconds)
        finally:
            await client.close()

    async def _follow_driver(self, run: int) -> None:
        """Whatever the driver in the engine says, as long as it is this engine."""
        if self.handover is None:
            return
        async for _ in _changes(self.settings.folder / HANDOVER):
            try:
                said = self.handover.state()
            except OSError as error:  # as while no more files may be open
                log.warning("What the driver says can't be read; it is tried again: %s", error)
                continue
            if said:
                self._take(state.CacheSeen(run, said.cache, said.is_settled, said.reason))

    # The goal

    @contextlib.asynccontextmanager
    async def _beside(self, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        task = asyncio.create_task(work)
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _delete_left_drivers(self) -> None:
        """Of instances that ran here before."""
        while True:
            await asyncio.sleep(left_drivers.EVERY_SECONDS)
            try:
                await asyncio.to_thread(left_drivers.delete_left, self.settings.state_dir / DRIVERS)
            except OSError as error:
                log.warning("What drivers have left can't be looked at: %s", error)

    async def _follow_goal(self) -> None:
        async for _ in _changes(self.settings.folder):
            try:
                goal = _read_goal()
            except OSError as error:  # as while no more files may be open
                log.warning("The goal can't be read; it is tried again: %s", error)
                continue
            if goal and goal is not self.instance.goal:
                self._take(state.GoalSet(goal))

    async def _end_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer:
            self._timer.cancel()


async def _until_all_is_gone(process: EngineProcess) -> str:
    try:
        return await process.ended()
    except OSError as error:
        return f"The engine has ended, but {error}."


async def _answers(client: Client, url: str) -> bool:
    try:
        async with client.open("GET", url, {}, seconds=PROBE_SECONDS) as answer:
            await answer.whole()
            return answer.status < 400
    except UpstreamFailed:
        return False


async def _changes(folder: Path) -> AsyncIterator[None]:
    """At once, then whenever something in this folder may have changed."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    with FolderWatch(folder, LOOK_SECONDS) as watch:

        def see() -> None:
            watch.clear()
            changed.set()

        if watch.descriptor is not None:
            loop.add_reader(watch.descriptor, see)
        try:
            while True:
                changed.clear()
                yield
                with contextlib.suppress(TimeoutError):
                    seconds = LOOK_SECONDS if watch.descriptor is None else LOOK_SECONDS_MAX
                    async with asyncio.timeout(seconds):
                        await changed.wait()
        finally:
            if watch.descriptor is not None:
                loop.remove_reader(watch.descriptor)


def _read_goal() -> Goal | None:
    """None while there is none, or one that nobody knows. Raises OSError."""
    try:
        with os.fdopen(os.open(GOAL, PLAIN), "rb") as file:
            said = file.read(GOAL_BYTES_MAX).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    try:
        return Goal(said)
    except ValueError:
        log.warning("There is no goal %r", said)
        return None


def _listen_here(name: str) -> socket.socket:
    """On a socket in the current folder, for this user only."""
    Path(name).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(name)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
