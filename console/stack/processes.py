"""Starting, hearing and signalling processes: the hands of the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from console.environment import PROJECT
from console.stack.services import WEB_SOCKET, Service

LINE_BYTES_MAX = 64 * 1024
DATAGRAM_BYTES_MAX = 4096
LAST_WORDS_SECONDS = 2.0
CREDENTIALS = struct.Struct("3i")  # process, user and group, as the kernel attests them


class Notifications:
    """The socket on which one service tells of itself (sd_notify).

    On Linux it has a name and no file, so nothing is left of it, come what may. Everybody on the machine
    can see that name and write to it, so only what comes from our own user is heard.
    """

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
        if sys.platform == "linux":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(bound)
        self._heard = heard
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            said, about, _, _ = self._socket.recvmsg(
                DATAGRAM_BYTES_MAX, socket.CMSG_SPACE(CREDENTIALS.size)
            )
            if sys.platform == "linux" and _sender(about) != os.geteuid():
                return
            for line in said.decode(errors="replace").splitlines():
                self._heard(line)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._path:
            self._path.unlink(missing_ok=True)


def _sender(about: list[tuple[int, int, bytes]]) -> int | None:
    """The user whose process has sent a datagram."""
    for level, kind, data in about:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            user: int = CREDENTIALS.unpack(data)[1]
            return user
    return None


@dataclass(frozen=True)
class Child:
    """A process in a session of its own, and what it prints.

    The pipes are ours and not asyncio's, whose `wait` ends only when they do: what a dead process has
    left running may hold them open for as long as it likes.
    """

    process: asyncio.subprocess.Process
    output: asyncio.StreamReader
    errors: asyncio.StreamReader | None
    _transports: tuple[asyncio.ReadTransport, ...]

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Signal the process itself; one that has ended is left in peace."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill_session(self) -> None:
        """Kill it and whatever it has started; after its end, what it has left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self, *reading: asyncio.Task[None]) -> int:
        """Wait until it has ended, its last words are read and nothing of it is left; its code."""
        code = await self.process.wait()
        self.kill_session()
        await asyncio.wait(reading, timeout=LAST_WORDS_SECONDS)
        for task in reading:
            task.cancel()
        for transport in self._transports:
            transport.close()
        return code


async def spawn(
    service: Service, environment: Mapping[str, str], web_socket: socket.socket | None
) -> Child:
    """Start it in a session of its own, so that Ctrl-C at the terminal reaches only the supervisor."""
    descriptor = web_socket.fileno() if web_socket and service.listens else -1
    command = [str(descriptor) if part == WEB_SOCKET else part for part in service.command]
    with contextlib.ExitStack() as ours:
        output, into_output, transport = await _pipe(ours)
        transports = [transport]
        errors, into_errors = None, into_output
        if service.spec.once:  # its output is for us, its errors for people
            errors, into_errors, transport = await _pipe(ours)
            transports.append(transport)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=into_output,
                stderr=into_errors,
                cwd=PROJECT,
                env={**environment, **service.environment},
                pass_fds=(descriptor,) if descriptor >= 0 else (),
                start_new_session=True,
            )
        except OSError:
            for one in transports:
                one.close()
            raise
    return Child(process, output, errors, tuple(transports))


async def _pipe(
    until_started: contextlib.ExitStack,
) -> tuple[asyncio.StreamReader, int, asyncio.ReadTransport]:
    """A reader, and a writing end that we keep only `until_started`."""
    source, sink = os.pipe()
    until_started.callback(os.close, sink)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(LINE_BYTES_MAX, loop)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader, loop=loop), os.fdopen(source, "rb", 0)
    )
    return reader, sink, transport


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


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
