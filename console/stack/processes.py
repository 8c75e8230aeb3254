"""Starting, hearing, signalling and remembering processes: the hands of the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import psutil

from console.stack.keys import write_private
from console.stack.services import Service

LINE_BYTES_MAX = 64 * 1024
CREATED_TOLERANCE_SECONDS = 1.0


class Notifications:
    """The socket on which one service tells of itself (sd_notify)."""

    def __init__(self, directory: Path, name: str, heard: Callable[[str], None]) -> None:
        self._path: Path | None = None
        if sys.platform == "linux":
            self.address = f"@tidegate-{secrets.token_hex(12)}-{name}"
            bound = "\0" + self.address[1:]
        else:
            self._path = directory / f"{name}.notify"
            self._path.unlink(missing_ok=True)
            self.address = bound = str(self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(bound)
        self._heard = heard
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in self._socket.recv(4096).decode(errors="replace").splitlines():
                self._heard(line)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._path:
            self._path.unlink(missing_ok=True)


class Remembered:
    """Which processes were started, for whoever comes after a supervisor that was killed.

    A process id may have been given to somebody else meanwhile, so the time of its start is kept too.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def remember(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            created = psutil.Process(pid).create_time()
            write_private(self.directory / f"{name}.json", json.dumps({"pid": pid, "created": created}))

    def forget(self, name: str) -> None:
        (self.directory / f"{name}.json").unlink(missing_ok=True)

    def alive(self) -> dict[str, psutil.Process]:
        found = {}
        for path in sorted(self.directory.glob("*.json")):
            try:
                fact = json.loads(path.read_text())
                process = psutil.Process(fact["pid"])
                same = abs(process.create_time() - fact["created"]) < CREATED_TOLERANCE_SECONDS
            except (ValueError, KeyError, psutil.NoSuchProcess):
                same = False
            if same:
                found[path.stem] = process
            else:
                path.unlink(missing_ok=True)
        return found


async def spawn(
    service: Service, environment: Mapping[str, str], web_socket: socket.socket | None
) -> asyncio.subprocess.Process:
    """Start it in a session of its own, so that Ctrl-C at the terminal reaches only the supervisor."""
    descriptor = web_socket.fileno() if web_socket and service.listens else -1
    command = [part.format(web_socket=descriptor) for part in service.command]
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if service.spec.once else asyncio.subprocess.STDOUT,
        env={**environment, **service.environment},
        pass_fds=(descriptor,) if descriptor >= 0 else (),
        start_new_session=True,
        limit=LINE_BYTES_MAX,
    )


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """What a process prints, line by line; a line too long to be one is cut."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                yield error.partial.decode(errors="replace")
            return
        except asyncio.LimitOverrunError as error:
            line = await stream.readexactly(error.consumed)
        yield line.decode(errors="replace").rstrip("\n")


def signal_group(pid: int, number: signal.Signals, *, whole: bool) -> None:
    """Signal a process, or with `whole` also everything it started."""
    with contextlib.suppress(ProcessLookupError):
        if whole:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def stop_leftovers(remembered: Remembered, seconds: float = 10.0) -> list[str]:
    """Stop what a killed supervisor left running; the names of what there was."""
    left = remembered.alive()
    for process in left.values():
        signal_group(process.pid, signal.SIGTERM, whole=False)
    _, stubborn = psutil.wait_procs(list(left.values()), timeout=seconds)
    for process in stubborn:
        signal_group(process.pid, signal.SIGKILL, whole=True)
    psutil.wait_procs(stubborn, timeout=seconds)
    for name in left:
        remembered.forget(name)
    return list(left)
