"""Daemons for tests, forked off a process that has already imported what they import.

A daemon's imports take half a second of a processor, a console's more than one, and the tests start
hundreds. One that is forked off runs the same module as `python -m` does, with arguments, environment
and descriptors of its own, and can be killed and stopped like any other. Tests of the start itself start
an interpreter (`subprocess.Popen`), and so do whole stacks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

ORDER_BYTES_MAX: Final = 1 << 17
DESCRIPTORS_MAX: Final = 32
TOLD_BYTES_MAX: Final = 64
PR_SET_PDEATHSIG: Final = 1
PROJECT: Final = Path(__file__).parent.parent
STANDARD: Final = (0, 1, 2)
# What is imported before: what does not read an environment, and so knows nothing of Django's settings.
DAEMONS: Final = ("kvss_agent.serve", "swdriver_shim.daemon.serve")
MANAGERS: Final = ("workload_manager.run",)
CLUSTER_SERVERS: Final = ("cluster_server.serve",)
CONSOLES: Final = (
    "celery.apps.worker",
    "celery.bin.celery",
    "channels.layers",
    "console.placement.planner",
    "console.placement.rails",
    "cryptography.fernet",
    "django.contrib.messages",
    "django.core.handlers.asgi",
    "django.core.management",
    "django.db.backends.postgresql.base",
    "django.forms",
    "django.template.defaulttags",
    "django.views.generic",
    "httpx",
    "jwt",
    "kombu.transport.redis",
    "kvss_agent.control",
    "markdown_it",
    "psycopg_pool",
    "pydantic",
    "redis.asyncio",
    "servestatic",
    "swdriver_shim.daemon.metrics",
    "swdriver_shim.daemon.shim",
    "telemetry.emit.reporter",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
    "uvloop",
    "yaml",
)
PRELOADED: Final = {
    "kvss_agent": DAEMONS,
    "swdriver_shim": DAEMONS,
    "tests.kvss_agent.tier2.crashing": DAEMONS,
    "celery": CONSOLES,
    "cluster_server": CLUSTER_SERVERS,
    "console.manage": CONSOLES,
    "console.serve": CONSOLES,
    "workload_manager": MANAGERS,
}


class Process(Protocol):
    """What tests use of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    descriptors: Mapping[int, int] | None = None,
    is_session: bool = False,
    directory: Path = PROJECT,
) -> Process:
    """Start `python -m module arguments` in a directory.

    `environment`: all of it, if not ours. `descriptors`: of ours, by the numbers that the process has
    them under; otherwise it has our standard ones. `is_session`: it leads a session of its own.
    """
    given = {**{place: place for place in STANDARD}, **(descriptors or {})}
    variables = dict(os.environ if environment is None else environment)
    order = _Order(module, arguments, variables, tuple(given), str(directory), is_session)
    return _server(PRELOADED[module]).fork(order, tuple(given.values()))


class Finished(NamedTuple):
    """How a process ended, and what it has written to its standard output and error."""

    code: int
    output: str
    errors: str


def finish(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, told: str = ""
) -> Finished:
    """Start `python -m module arguments`, which is told this, and wait for its end."""
    with contextlib.ExitStack() as stack:
        given, output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in STANDARD)
        given.write(told.encode())
        given.seek(0)
        files = {0: given.fileno(), 1: output.fileno(), 2: errors.fileno()}
        code = start(module, *arguments, environment=environment, descriptors=files).wait()
        for file in (output, errors):
            file.seek(0)
        return Finished(code, output.read().decode(), errors.read().decode())


def run(module: str, *arguments: str, environment: Mapping[str, str], told: str = "") -> str:
    """The output of one that has to succeed."""
    done = finish(module, *arguments, environment=environment, told=told)
    assert done.code == 0, done.errors
    return done.output


class _Order(NamedTuple):
    """What to run. `places` are the numbers that the descriptors sent along get."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    places: Sequence[int]
    directory: str
    is_session: bool


@dataclass
class _Forked:
    """A process that is a child of the server, which tells its exit code when it ends."""

    pid: int
    _ending: socket.socket
    _code: int | None = None

    def poll(self) -> int | None:
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended_within(self, seconds: float | None) -> int | None:
        if self._code is None:
            self._ending.settimeout(seconds)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self._code = int(self._ending.recv(TOLD_BYTES_MAX))
                self._ending.close()
        return self._code


class _Server:
    """Our end of a server, which ends with us, whatever we die of."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.processes", str(theirs.fileno()), *preloaded],
                cwd=PROJECT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self._end)

    def fork(self, order: _Order, descriptors: Sequence[int]) -> _Forked:
        ending, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            told = json.dumps(order._asdict()).encode()
            socket.send_fds(self._orders, [told], [theirs.fileno(), *descriptors])
        return _Forked(int(ending.recv(TOLD_BYTES_MAX)), ending)

    def _end(self) -> None:
        self._orders.close()
        self._process.wait()


@functools.cache
def _server(preloaded: tuple[str, ...]) -> _Server:
    return _Server(preloaded)


# In the server


def _main(descriptor: str, *preloaded: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at a terminal it is for whoever runs the tests
    gc.disable()
    for module in preloaded:
        importlib.import_module(module)
    assert "console.settings" not in sys.modules, "They are those of each console."
    for module in {one for one in sys.modules if one.endswith(".__main__")}:
        del sys.modules[module]  # each child runs its own
    gc.freeze()
    if born := _serve(socket.socket(fileno=int(descriptor))):
        _become(*born)


def _serve(orders: socket.socket) -> tuple[_Order, list[int]] | None:
    """Fork until nobody can ask any more. Returns in each child, with its order and descriptors."""
    waiting = selectors.DefaultSelector()
    waiting.register(orders, selectors.EVENT_READ)
    endings: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not orders:
                waiting.unregister(key.fd)
                _tell_of_end(key.fd, *endings.pop(key.fd))
                continue
            told, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, DESCRIPTORS_MAX)
            if not told:
                return None
            ending = socket.socket(fileno=descriptors.pop(0))
            if not (pid := os.fork()):
                waiting.close()
                for own in (orders, ending, *(other for _, other in endings.values())):
                    own.close()
                for descriptor in endings:
                    os.close(descriptor)
                return _Order(**json.loads(told)), descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            ending.send(str(pid).encode())
            process = os.pidfd_open(pid)
            endings[process] = pid, ending
            waiting.register(process, selectors.EVENT_READ)


def _tell_of_end(process: int, pid: int, ending: socket.socket) -> None:
    os.close(process)
    _, status = os.waitpid(pid, 0)
    with ending, contextlib.suppress(OSError):  # nobody waits for it any more
        ending.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(order: _Order, descriptors: Sequence[int]) -> None:
    """Be that process, as far as a program can tell."""
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with the server, and so with the tests
    if order.is_session:
        os.setsid()
    above = max((*order.places, *descriptors)) + 1
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for place, copy in zip(order.places, copies, strict=True):
        os.dup2(copy, place)
        os.close(copy)
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    time.tzset()
    sys.argv = [order.module, *order.arguments]
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
