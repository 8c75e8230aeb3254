"""Process 1 of a container: it starts the manager or the job, reports it over HTTP, and exits as it did.

    POST /status    {"after": N, "wait": S, "goal": "DRAIN"} with the key of the pod: what there is to
                    report, once it is newer than N. The goal is handed to the manager first
    POST /done      with the key: the result of a job is stored, so the runner may exit
    GET /ready      200 while the manager says that it is ready
    GET /live       200 unless the manager has been silent for too long

The kernel ends all that runs in the container together with process 1: so nothing of a manager is left
when the kubelet starts the container again. The manager needs neither Kubernetes' API nor a credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster_server.pod.http import Answer, Request, serve
from cluster_server.processes.core import Goal
from cluster_server.processes.kernel import MARK
from cluster_server.processes.manager_status import ManagerStatus, ProgressStatus, ask, is_own_fault
from kvss_agent.process.durable_file import write_durably
from telemetry.decoder import MESSAGE, Limits, Malformed, decode, excerpt
from telemetry.units import size

KEY: Final = "runner.key"
WAIT_SECONDS_MAX: Final = 60.0
ASK_AGAIN_SECONDS: Final = 0.05
ASK_AGAIN_SECONDS_MAX: Final = 2.0
PROGRESS_SECONDS: Final = 0.5
RESULT_BYTES_MAX: Final = (1 << 20) - 64  # a ConfigMap has 1 MiB, of which names are a part
TOO_LARGE: Final = "ResultTooLarge"
LINE_BYTES_MAX: Final = 4096
SIGNAL_STATUS: Final = 128  # as a shell says it


class Asked(msgspec.Struct, frozen=True):
    after: int = 0
    wait: float = 0.0
    goal: str = ""


class JobReport(msgspec.Struct, frozen=True):
    """`exit_status`: None while it runs; of a signal its number below 0."""

    exit_status: int | None = None
    progress: ProgressStatus | None = None
    result: str | None = None
    reason: str = ""
    sentence: str = ""
    said_last: str = ""


class Report(msgspec.Struct, frozen=True):
    """What a runner answers. `version` is another one after each change, and begins above those of the
    runner before it in the same pod."""

    version: int
    manager: ManagerStatus | None = None
    job: JobReport | None = None


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    kind: str
    folder: Path
    inputs: Path
    secrets: Path
    port: int
    key: str = field(repr=False)
    silent_seconds: float
    command: tuple[str, ...]
    environment: Mapping[str, str]


class Runner:
    def __init__(self, settings: RunnerSettings) -> None:
        self._settings = settings
        self._folder = settings.folder
        self._report = Report(time.time_ns() // 1000)
        self._changed = asyncio.Event()
        self._is_done = asyncio.Event()  # the result of a job is stored, or nobody wants it any more
        self._answered_at = time.monotonic()
        self._child: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Until its process has ended; the exit status of that. Raises OSError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._terminate)
        self._make_folder()
        server = await serve(self._settings.port, self._answer)
        try:
            return await (self._run_manager() if self._settings.kind == "run" else self._run_job())
        finally:
            server.close()

    # What it runs

    async def _run_manager(self) -> int:
        goal = self._told() or Goal.RUN
        self._tell(goal)
        if self._is_done.is_set() or goal is Goal.DRAIN:
            return 0  # what it drained has ended with the container before this one
        child = await self._start()
        asking = asyncio.create_task(self._ask())
        try:
            return _exit_status(await child.wait())
        finally:
            asking.cancel()

    async def _run_job(self) -> int:
        child = await self._start(output=asyncio.subprocess.PIPE)
        self._show(job=JobReport())
        reading = asyncio.create_task(_copy(child.stdout))
        looking = asyncio.create_task(self._look_at_progress())
        status = await child.wait()
        # What its own processes still write is nobody's: they end with this one.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(reading)
        looking.cancel()
        self._show(job=self._ended(status, _last(reading)))
        await self._is_done.wait()
        return _exit_status(status)

    async def _start(self, output: int | None = None) -> asyncio.subprocess.Process:
        settings = self._settings
        self._child = await asyncio.create_subprocess_exec(
            *(*settings.command, settings.kind, "--folder", str(self._folder)),
            env={**settings.environment, MARK: str(self._folder)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT if output else None,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        if self._is_done.is_set():  # SIGTERM came before it
            self._child.terminate()
        return self._child

    def _reap(self) -> None:
        """Collect what orphans of this container have left. Its own child is asyncio's to collect."""
        child = self._child.pid if self._child else 0
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid == child:
                    return  # others behind it are found with the next one that ends
                os.waitpid(ended.si_pid, 0)

    def _terminate(self) -> None:
        self._is_done.set()
        if self._child and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()

    # Its folder

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, source in (
            ("spec.json", self._settings.inputs),
            ("secrets.json", self._settings.secrets),
        ):
            link = self._folder / name
            if (source / name).exists() and not link.is_symlink():
                link.symlink_to(source / name)

    def _told(self) -> Goal | None:
        try:
            return Goal((self._folder / "goal").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _tell(self, goal: Goal) -> None:
        """A goal never leaves DRAIN."""
        if self._told() not in (goal, Goal.DRAIN):
            write_durably(self._folder / "goal", goal.encode())

    # What it reports

    async def _ask(self) -> None:
        """Follow what the manager says of itself."""
        version, pause, before, could_ask_at = 0, ASK_AGAIN_SECONDS, "", time.monotonic()
        while True:
            try:
                said = await ask(self._folder, version)
            except Exception as error:  # noqa: BLE001 - unforeseen or not, it is asked again
                now = time.monotonic()
                if is_own_fault(error):
                    self._answered_at += now - could_ask_at  # for so long it may have
                    if repr(error) != before:
                        before = repr(error)
                        print(f"The manager can't be asked: {before}", file=sys.stderr)
                could_ask_at = now
                await asyncio.sleep(pause)
                pause, version = min(pause * 2, ASK_AGAIN_SECONDS_MAX), 0
                continue
            version, pause, before = said.version, ASK_AGAIN_SECONDS, ""
            self._answered_at = could_ask_at = time.monotonic()
            self._show(manager=said)

    async def _look_at_progress(self) -> None:
        while True:
            progress = self._read("progress.json", ProgressStatus)
            if progress and self._report.job and progress != self._report.job.progress:
                self._show(job=JobReport(progress=progress))
            await asyncio.sleep(PROGRESS_SECONDS)

    def _ended(self, status: int, said_last: str) -> JobReport:
        error = self._read("error.json", _Error) or _Error()
        result = None
        try:
            if (raw := self._bytes("result.json", RESULT_BYTES_MAX)) is not None:
                result = raw.decode()
            elif (self._folder / "result.json").exists():
                sentence = f"Its result has more than {size(RESULT_BYTES_MAX)}."
                error = _Error(TOO_LARGE, sentence)
        except UnicodeDecodeError:
            error = _Error("ResultUnusable", "Its result is not UTF-8.")
        return JobReport(
            exit_status=status,
            progress=self._read("progress.json", ProgressStatus),
            result=result,
            reason=excerpt(error.reason, 100),
            sentence=excerpt(error.sentence, 500),
            said_last=excerpt(said_last, 300),
        )

    def _bytes(self, name: str, bytes_max: int) -> bytes | None:
        try:
            with (self._folder / name).open("rb") as file:
                found = file.read(bytes_max + 1)
        except FileNotFoundError:
            return None
        return found if len(found) <= bytes_max else None

    def _read(self, name: str, kind: type[Any]) -> Any:
        raw = self._bytes(name, MESSAGE.bytes_max)
        try:
            return decode(raw, kind, MESSAGE) if raw else None
        except Malformed:
            return None

    def _show(self, **changed: Any) -> None:
        version = max(self._report.version + 1, time.time_ns() // 1000)
        self._report = msgspec.structs.replace(self._report, version=version, **changed)
        self._changed.set()
        self._changed = asyncio.Event()

    # Who asks

    async def _answer(self, request: Request) -> Answer:
        match request.method, request.path:
            case "GET", "/live":
                return Answer(200 if self._is_live() else 503)
            case "GET", "/ready":
                manager = self._report.manager
                return Answer(200 if manager and manager.state == "ready" else 503)
            case "POST", "/status" | "/done":
                if not hmac.compare_digest(request.key.encode(), self._settings.key.encode()):
                    return Answer(401)
        if request.path == "/done" and self._settings.kind != "run":
            self._is_done.set()
            return Answer(200)
        if request.path != "/status" or request.method != "POST":
            return Answer(404)
        try:
            asked = decode(request.body, Asked, Limits(MESSAGE.bytes_max))
            if asked.goal and self._settings.kind == "run":
                self._tell(Goal(asked.goal))
        except (Malformed, ValueError):
            return Answer(400)
        return Answer(200, msgspec.json.encode(await self._newer(asked)))

    async def _newer(self, asked: Asked) -> Report:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(asked.wait, 0.0), WAIT_SECONDS_MAX)):
                while self._report.version <= asked.after:
                    await self._changed.wait()
        return self._report

    def _is_live(self) -> bool:
        if self._settings.kind != "run":
            return True
        return time.monotonic() - self._answered_at < self._settings.silent_seconds


class _Error(msgspec.Struct, frozen=True):
    reason: str = ""
    sentence: str = ""


async def _copy(output: asyncio.StreamReader | None) -> str:
    """To the log of the container, what a job prints. Returns the last line that says something."""
    said_last, rest = "", b""
    while output and (piece := await output.read(LINE_BYTES_MAX)):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        *lines, rest = (rest + piece)[-2 * LINE_BYTES_MAX :].split(b"\n")
        for line in lines:
            said_last = line.decode(errors="replace").strip() or said_last
    return rest.decode(errors="replace").strip() or said_last


def _last(reading: asyncio.Task[str]) -> str:
    if reading.done():
        return reading.result()
    reading.cancel()
    return ""


def _exit_status(returned: int) -> int:
    return SIGNAL_STATUS - returned if returned < 0 else returned
