"""One instance: its worker, what its manager says, and what is shown of both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec

from cluster_server.processes.core import (
    Goal,
    Memory,
    Next,
    Running,
    Seen,
    Step,
    next_for_instance,
    settled,
)
from cluster_server.processes.folder import About
from cluster_server.processes.keeper import Keeper, Launch
from cluster_server.processes.log_file import LogFile
from cluster_server.processes.manager_status import ManagerStatus, ask, is_own_fault
from cluster_server.processes.surroundings import Surroundings
from cluster_server.processes.worker import Worker
from cluster_server.proto import cluster_pb2 as pb
from telemetry.decoder import Malformed, decode, excerpt

log = logging.getLogger(__name__)

STATUS_FILE: Final = "status.json"
ASK_AGAIN_SECONDS: Final = 0.05  # after the first failure; then twice as long each time, up to
ASK_AGAIN_SECONDS_MAX: Final = 2.0
MINOR: Final = ("seen_at", "running_requests")  # changes that nobody is told of at once


class InstanceWorker(Worker):
    """`on_change(worker, is_minor)`: its status is another one."""

    def __init__(
        self,
        workload: str,
        name: str,
        wanted: pb.Instance | None,
        keeper: Keeper,
        around: Surroundings,
        on_change: Callable[[InstanceWorker, bool], None],
        on_gone: Callable[[InstanceWorker], None],
    ) -> None:
        super().__init__(name, keeper, around)
        self.workload = workload
        self.wanted = wanted
        about = keeper.folder.about() if keeper.folder.exists() else About()
        self._grace_seconds = wanted.grace_seconds if wanted else about.grace_seconds
        self._boxes = list(wanted.boxes) if wanted else list(about.boxes)
        self.log = LogFile(keeper.folder.log)
        self.is_known = asyncio.Event()  # its status is what its manager has told this server, if it can
        # What its manager has said last, and when.
        self._told, self._told_at = _stored(keeper, self._now())
        self._process = keeper.process
        self._asked_since = self._now()  # this process can't have been silent for longer
        self._is_overdue = False
        self._unasked = ""  # why its manager can't be asked
        self._on_change = on_change
        self._on_gone = on_gone
        self._seen: Seen | None = None
        self._is_gone = False
        self._asking: asyncio.Task[None] | None = None
        self.status = pb.InstanceStatus()
        self.show()

    def want(self, wanted: pb.Instance | None) -> None:
        """None: it should end, and be forgotten."""
        self.wanted = wanted
        if wanted:
            self._grace_seconds = wanted.grace_seconds
        self.show()
        self.wake()

    def end(self, seconds_max: float) -> None:
        """Forget it, within a shorter time than it has at other times."""
        self._grace_seconds = min(self._grace_seconds, seconds_max)
        self.want(None)

    def give_time(self) -> None:
        """It could not be heard until now: this server stood still."""
        self._asked_since = self._now()

    @property
    def is_done(self) -> bool:
        return self._is_gone

    @property
    def has_ended(self) -> bool:
        """Nothing more is written to its log."""
        return self._is_gone or self.keeper.memory.is_over

    async def let_go(self) -> None:
        self._stop_asking()
        await super().let_go()

    def last_seen(self) -> float:
        return max(self._told_at, self._asked_since)

    def decide(self, seen: Seen) -> Next:
        if self.keeper.process != self._process:  # a new one has all its time to answer
            self._process, self._asked_since = self.keeper.process, self._now()
        seen = replace(seen, last_seen=max(seen.last_seen, self.last_seen()))
        self._seen = seen
        if seen.process is Running.YES:
            self._start_asking()
        else:
            self._stop_asking()
            self._told, self._told_at, self._is_overdue = None, 0.0, False
            self.is_known.set()
        decided = next_for_instance(
            self._goal(), self._grace_seconds, seen, self.keeper.memory, self._now(), self.around.limits
        )
        if self.wanted is None and not seen.has_folder and not seen.is_alive:
            self._is_gone = True
        self.show()
        return decided

    def do(self, step: Step, seen: Seen) -> None:
        wanted = self.wanted
        match step:
            case Step.MAKE if wanted:
                about = About(self.workload, self._grace_seconds, tuple(self._boxes))
                self.keeper.folder.make(about, wanted.spec, dict(wanted.secrets))
            case Step.START if wanted:
                self.log.rotate()
                self.keeper.start(self._launch(wanted), self._now())
            case Step.TELL if goal := self._goal():
                self.keeper.tell(goal)
            case Step.TERMINATE:
                self.keeper.terminate(self._now())
            case Step.KILL:
                log.warning("%s: killing all of it", self.name)
                self.keeper.kill()
            case Step.SETTLE if goal := self._goal():
                self.keeper.settle(settled(goal, seen, self.keeper.memory, self._now()))
                log.info("%s: %s", self.name, self.keeper.memory.sentence)
            case Step.FORGET:
                self.keeper.forget()
                log.info("%s: gone", self.name)

    def finish(self) -> None:
        self._stop_asking()
        self._on_gone(self)

    def _goal(self) -> Goal | None:
        return Goal(pb.Goal.Name(self.wanted.goal)) if self.wanted else None

    def _launch(self, wanted: pb.Instance) -> Launch:
        around = self.around
        return Launch(
            [*around.command, "run", "--folder", str(self.keeper.folder.path)],
            around.environment_of_processes(),
            wanted.resources.memory_bytes,
            wanted.resources.cpu_millis,
        )

    def _now(self) -> float:
        return self.around.clock.now()

    def _start_asking(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name=f"{self.name} status")

    def _stop_asking(self) -> None:
        if self._asking:
            self._asking.cancel()
            self._asking, self._unasked = None, ""

    async def _ask(self) -> None:
        version, pause, before, could_ask_at = 0, ASK_AGAIN_SECONDS, "", self.last_seen()
        while True:
            try:
                told = await ask(self.keeper.folder.path, version)
                self._take(told)
            except Exception as error:  # also what nobody has foreseen: it is asked again
                if is_own_fault(error):
                    if repr(error) != self._unasked:
                        log.exception("%s: its manager can't be asked", self.name)
                    self._unasked = repr(error)
                    # For so long it may have answered. Not more, or faults now and then would keep a
                    # silent one alive.
                    seconds = self._now() - could_ask_at
                    self._asked_since = min(self.last_seen() + seconds, self._now())
                else:
                    is_late = isinstance(error, TimeoutError) or pause > ASK_AGAIN_SECONDS * 8
                    self._is_overdue = self._is_overdue or (self._told is not None and is_late)
                    if isinstance(error, Malformed) and str(error) != before:
                        before = str(error)
                        log.warning("%s: its manager's status is unusable: %s", self.name, error)
                    self._unasked = ""
            else:
                version, pause, could_ask_at = told.version, ASK_AGAIN_SECONDS, self._now()
                continue
            could_ask_at = self._now()
            self._show_unasked()
            await asyncio.sleep(pause)
            pause = min(pause * 2, ASK_AGAIN_SECONDS_MAX)
            version = 0  # another manager counts from the beginning

    def _show_unasked(self) -> None:
        try:
            self.show()
        except Exception:  # that nobody has foreseen: its manager is asked again all the same
            log.exception("%s: its status can't be shown", self.name)

    def _take(self, told: ManagerStatus) -> None:
        self._is_overdue, self._unasked = False, ""
        self._told_at = self._now()
        if told != self._told:
            self._told = told
            with contextlib.suppress(OSError):  # it is told again
                self.keeper.folder.write_note(STATUS_FILE, msgspec.json.encode(told))
        self.is_known.set()
        self.show()

    def show(self) -> None:
        before, self.status = self.status, self._shown()
        if before != self.status:
            self._on_change(self, but_minor(before) == but_minor(self.status))

    def _shown(self) -> pb.InstanceStatus:
        """Its status: the manager's word while it runs, else ours."""
        memory = self.keeper.memory
        is_running = self._seen is None or self._seen.process is Running.YES
        if self._told and is_running and not memory.is_over:
            status = self._told.message(self.name)
        else:
            status = pb.InstanceStatus(name=self.name, state=pb.PENDING)
            status.reason, status.sentence = _own_word(memory, self._seen)
            status.since = self._since(status)
        if memory.is_over:
            status.state, status.since = pb.GONE, memory.ended_at
        elif self.wanted is None:
            status.state, status.reason = pb.DRAINING, "Terminating"
            status.sentence = (
                f"It is terminated: what runs {self._grace_seconds:g} s after that is killed."
            )
            status.since = memory.terminated_at or self._since(status)
        elif self.problem:
            status.reason, status.sentence = "Refused", excerpt(self.problem, 500)
        elif self._unasked and is_running:
            status.reason = "ManagerSilent"
            status.sentence = excerpt(f"Its manager can't be asked: {self._unasked}", 500)
        elif self._is_overdue and is_running:
            status.reason = "ManagerSilent"
            status.sentence = "Its manager does not answer. What is shown is what it has said last."
        status.host, status.seen_at = self.around.host, self._told_at
        status.boxes.extend(self._boxes)
        return status

    def _since(self, status: pb.InstanceStatus) -> float:
        same = (self.status.state, self.status.reason) == (status.state, status.reason)
        return self.status.since if same and self.status.since else self._now()


def _own_word(memory: Memory, seen: Seen | None) -> tuple[str, str]:
    if seen and seen.process is Running.ENDED:
        return "ManagerEnded", "Its manager has ended."
    if memory.reason and (memory.is_over or (seen and seen.process is Running.NEVER)):
        return memory.reason, memory.sentence
    return "Starting", "Its manager is being started."


def but_minor(status: pb.InstanceStatus) -> pb.InstanceStatus:
    copy = pb.InstanceStatus()
    copy.CopyFrom(status)
    for field in MINOR:
        copy.ClearField(field)
    return copy


def _stored(keeper: Keeper, now: float) -> tuple[ManagerStatus | None, float]:
    """What its manager has told the server before this one, and when: by a clock that may have been set
    back since."""
    raw = keeper.folder.read(STATUS_FILE, 1 << 16)
    if raw is None or keeper.process is None:
        return None, 0.0
    with contextlib.suppress(Malformed, OSError):
        found = decode(raw, ManagerStatus)
        found.check()
        return found, min((keeper.folder.path / STATUS_FILE).stat().st_mtime, now)
    return None, 0.0
