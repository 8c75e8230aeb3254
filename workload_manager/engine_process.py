"""The processes of an engine: started, listened to, ended to the last one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvss_agent.process.durable_file import write_durably
from telemetry import leash
from telemetry.decoder import Malformed, decode
from workload_manager.engines.base import Launch
from workload_manager.listeners import listeners

log = logging.getLogger(__name__)

MARK: Final = (
    "TIDEGATE_ENGINE_OF"  # in the environment of all that an engine starts: the instance's folder
)
FOLDER: Final = "TIDEGATE_FOLDER"
STARTED: Final = "engine.json"
LEASH: Final = Path(leash.__file__)
LINE_BYTES_MAX: Final = 8192
LINES_KEPT: Final = 200
SENTENCE_CHARACTERS_MAX: Final = 400
GONE_SECONDS: Final = 10.0  # for processes that were killed
LOOK_SECONDS: Final = 0.02
_NO_COLORS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What loggers put before a line: process, level, time, place.
_PREFIX: Final = re.compile(
    r"^(\([\w ]+(pid=\d+)?\)\s*|(ERROR|WARNING|INFO|CRITICAL|FATAL)\b:?\s*|"
    r"\d{4}-\d\d-\d\d[T ]\S+\s*|\d\d-\d\d \d\d:\d\d:\d\d\s*|\[[^]]{1,80}\]\s*)+"
)
_TELLS: Final = re.compile(
    r"(\w*(Error|Exception)\b|\berror\b|\bfatal\b|\bcan't\b|\bcannot\b|\bfailed\b)", re.IGNORECASE
)
_SAYS_NOTHING: Final = re.compile(
    r"see root cause above|^Traceback|^\s*File \"|^\s*\^+\s*$", re.IGNORECASE
)


class EngineProcess:
    """One start of an engine. In a session of its own, so that signals of terminals do not reach it."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._log = _Log()
        self._is_killed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, launch: Launch, folder: Path) -> EngineProcess:
        """In the instance's folder. Call it in the main thread, with which the engine is to end. Raises
        OSError."""
        environment = {
            **os.environ,
            **launch.environment,
            FOLDER: str(folder),
            MARK: str(folder),
        }
        for ours in ("NOTIFY_SOCKET", "NOTIFY_FILE"):
            environment.pop(ours, None)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *launch.command),
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=LINE_BYTES_MAX,
        )
        leader = _stat(process.pid)
        started = _Started(process.pid, _boot(), leader.started_ticks if leader else None)
        engine = cls(process, folder)
        try:
            write_durably(folder / STARTED, msgspec.json.encode(started))
        except OSError:  # as on a full disk: the next manager would not know it
            engine.end(kill=True)
            await process.wait()
            raise
        return engine

    async def ended(self) -> str:
        """Wait until no process of it is left, and pass on meanwhile what it says. Returns how it ended,
        in a sentence."""
        passing = asyncio.create_task(self._pass_on())
        try:
            status = await self._process.wait()
            # What it has started does not go on without it.
            await kill_all(self._folder, led_until=_ticks_now())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(passing), GONE_SECONDS)
        finally:
            passing.cancel()
        return sentence(status, list(self._lines), was_killed=self._is_killed)

    def forget_start(self) -> None:
        """It answers: what it has said so far does not tell why it ends later."""
        self._lines.clear()

    def stranger_at(self, port: int) -> str:
        """Who listens there and is known not to be of this engine, in a sentence. In a thread."""
        known = listeners(port)
        if not known:
            return ""
        last = _last_started(self._folder)
        others = known - set(_left(self._folder, last, led_until=_ticks_now()))
        for pid in sorted(others):
            if self._is_stranger(pid, last):
                who = f"process {pid} ({_name(pid)})"
                return f"Port {port} is answered by {who}, which is not of this engine."
        return ""

    def _is_stranger(self, pid: int, last: _Started | None) -> bool:
        """A launcher may give the engine to somebody else to start, as to a daemon of containers, with
        another session and environment. So what is younger than the launcher may be the engine, unless
        it is known to be of another instance."""
        lineage = _lineage(pid)
        if self.pid in lineage:
            return False
        if any(map(_has_mark, lineage)):
            return True
        found = _stat(pid)
        if found is None or last is None or last.started_ticks is None:
            return False
        return found.started_ticks < last.started_ticks

    def end(self, *, kill: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not kill:
                self._process.terminate()
            elif self._process.returncode is None:  # else its number may be another group's
                self._is_killed = True
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _pass_on(self) -> None:
        """To the instance's log."""
        output = self._process.stdout
        assert output  # noqa: S101 - it was asked for
        while True:
            try:
                raw = await output.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                raw = error.partial
            except asyncio.LimitOverrunError as error:
                raw = await output.readexactly(error.consumed)
            if not raw:
                self._log.write("")  # only what was lost
                return
            text = raw.decode(errors="replace").rstrip("\r\n")
            self._lines.append(text)
            self._log.write(text + "\n")


class _Log:
    """Our own standard error, which is the instance's log.

    Where it can't be written to, as on a full disk, lines are lost and counted: an engine that nobody
    reads hangs. A write goes past the buffers of `sys.stderr`, which keep what has failed and write it
    later."""

    def __init__(self) -> None:
        self._lost = 0

    def write(self, text: str) -> None:
        """And before it, how many lines were lost since the last that was written."""
        try:
            if self._lost:
                # The last one may have been written in part.
                _write(f"\n{self._lost} lines of the engine are lost: the log could not be written.\n")
                self._lost = 0
            _write(text)
        except Exception:  # noqa: BLE001 - whatever it is, the engine is read on
            self._lost += 1


def _write(text: str) -> None:
    """Raises OSError."""
    left = text.encode(errors="replace")
    while left:
        left = left[os.write(sys.stderr.fileno(), left) :]


def sentence(status: int, lines: list[str], *, was_killed: bool) -> str:
    """How an engine ended, with the last line that says something."""
    if was_killed:
        how = "The engine was killed"
    elif status == -signal.SIGKILL:  # which leaves no time for a last line
        return "The engine was ended by SIGKILL, as by the kernel when there is too little memory."
    elif status < 0:
        how = f"The engine was ended by {_signal_name(-status)}"
    else:
        how = f"The engine ended with status {status}"
    said = telling_line(lines)
    if not said:
        return f"{how}."
    return f"{how}: {said}" if said.endswith((".", "!", "?")) else f"{how}: {said}."


def telling_line(lines: list[str]) -> str:
    """The line that says best what went wrong: the last that sounds like an error, else the last."""
    clean = [_PREFIX.sub("", _NO_COLORS.sub("", line)).strip() for line in lines]
    clean = [line for line in clean if line and not _SAYS_NOTHING.search(line)]
    telling = next((line for line in reversed(clean) if _TELLS.search(line)), clean[-1] if clean else "")
    return "".join(one for one in telling if one.isprintable())[:SENTENCE_CHARACTERS_MAX]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Started(msgspec.Struct, frozen=True):
    """The session of the last engine that was started, on which boot of the machine."""

    session: int
    boot: str
    # Of its leader. Not known if that has ended at once, nor where an earlier version started it.
    started_ticks: int | None = None


class _Stat(msgspec.Struct, frozen=True):
    state: str
    parent: int
    session: int
    started_ticks: int


async def kill_all(folder: Path, led_until: int = 0) -> None:
    """Kill all that an engine of this instance has started, and wait until it is gone. Also what is left
    of an earlier manager. Raises OSError if something does not go. `led_until`: until when the leader of
    the engine's session is known to have been there, in ticks."""
    last = _last_started(folder)
    deadline = asyncio.get_running_loop().time() + GONE_SECONDS
    while left := list(_left(folder, last, led_until)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if asyncio.get_running_loop().time() > deadline:
            raise OSError(f"processes of an engine can't be ended: {left}")
        await asyncio.sleep(LOOK_SECONDS)


def _last_started(folder: Path) -> _Started | None:
    try:
        found = decode((folder / STARTED).read_bytes(), _Started)
    except (FileNotFoundError, Malformed):
        return None
    return found if found.boot == _boot() else None


def _left(folder: Path, last: _Started | None, led_until: int) -> Iterator[int]:
    """Processes of engines of this instance. Some write their title over their environment, and some
    begin a session of their own: so they are known by either."""
    wanted = f"{MARK}={folder}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            found = _stat(pid)
            if found is None or found.state in ("Z", "X"):
                continue
            is_ours = (
                last is not None
                and found.session == last.session
                and _is_in_session(pid, found, folder, last, led_until)
            )
            if is_ours or wanted in _environment(pid):
                yield pid


def _is_in_session(pid: int, found: _Stat, folder: Path, last: _Started, led_until: int) -> bool:
    """Whether the session with that number is still the engine's. The number is nobody else's as long as
    there is somebody in the session. After that another process may have it, and may open a session."""
    leader = _stat(last.session)
    if leader and last.started_ticks is not None:
        return leader.started_ticks == last.started_ticks
    # The leader is gone, or nobody recorded when it was started: by itself the number says nothing. What
    # was in the session while the engine led it is the engine's, and so is what works in the instance's
    # folder, where nobody else does. The rest may be a stranger's, and is left alone.
    return found.started_ticks <= led_until or _works_in(pid, folder)


def _works_in(pid: int, folder: Path) -> bool:
    return Path(f"/proc/{pid}/cwd").samefile(folder)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of the program, in parentheses, may have any character in it.
    fields = text.rpartition(b")")[2].split()
    return _Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def _lineage(pid: int) -> list[int]:
    """This process and those above it, up to the first of the machine or container."""
    found: list[int] = []
    while pid and pid not in found and (stat := _stat(pid)):
        found.append(pid)
        pid = stat.parent
    return found


def _has_mark(pid: int) -> bool:
    """Whether it is of an engine, of whichever instance."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return any(one.startswith(f"{MARK}=".encode()) for one in _environment(pid))
    return False


def _environment(pid: int) -> list[bytes]:
    """Raises OSError."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _name(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "it has ended"
    return "".join(one for one in name if one.isprintable())


def _ticks_now() -> int:
    """By the clock that the kernel notes starts of processes by."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
