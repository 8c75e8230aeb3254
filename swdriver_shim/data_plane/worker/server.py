"""The driver in two processes: one decides, and has a `RemoteShard` for each `Shard` of the others.

    server = WorkerServer()                        # in a worker; it listens from here on
    server.address                                 # goes to the decider by a way that both trust

    connection = WorkerConnection(server.address, on_message=…)    # in the process that decides
    shard = RemoteShard("full.0", connection, home)
    driver = Decider(layout, "llama", [[shard]])

Only the worker's `Shard` writes to its slots, so everything else that is done to them goes through it as
well: clears, spills, recalls, moves. No bytes of columns take this way; those go between the worker and
its agent. The connection is a Unix socket in a directory that only its user may enter, with a secret as
well, since data keys of orgs travel on it. Both processes are started together and have one version, so
there is nothing to negotiate.

A lost worker is treated as a lost agent: what it is asked for is not done, and nothing raises.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import secrets
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw

from kvss_agent.client import Credentials
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.worker.protocol import (
    FRAME_BYTES_MAX,
    Answer,
    Changed,
    ControlSpec,
    HomeSpec,
    Method,
    PullSpec,
    Request,
    State,
    WorkerAddress,
    WorkerMessage,
    method_of,
    pack,
    read,
    shut,
)
from telemetry.decoder import Malformed

log = logging.getLogger(__name__)

THREADS_MAX: Final = 64
SECRET_BYTES: Final = 32
_REQUESTS: Final = msgspec.msgpack.Decoder(Request)


class WorkerServer:
    """Carries out what a decider asks of the shards of this worker. `shards` has those that were opened
    so far, by name."""

    def __init__(self) -> None:
        self.shards: dict[str, Shard] = {}
        self._credentials: dict[str, Credentials] = {}  # by shard, as received last
        self._capabilities: dict[str, str] = {}  # likewise, for the move of a shard
        self._directory = Path(tempfile.mkdtemp(prefix="tidegate-"))  # only this user may enter it
        secret = secrets.token_bytes(SECRET_BYTES)
        path = str(self._directory / "worker.sock")
        self.address = WorkerAddress(path, base64.b64encode(secret).decode())
        self._listener = Listener(path, "AF_UNIX", authkey=secret)
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="worker-server")
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._connection: Connection[Any, Any] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="worker-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with self._sending:
            shut(self._connection)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as wake_up:
            wake_up.connect(self.address.path)  # the listener may be waiting for a connection
        self._thread.join()
        self._listener.close()
        for shard in tuple(self.shards.values()):  # others may be opened until the threads have ended
            shard.end_move()
        self._threads.shutdown(cancel_futures=True)
        for shard in self.shards.values():
            shard.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def shard_of(self, group: str) -> Shard | None:
        """The shard of a group, if it was opened. Steps wait for it, so it waits for nobody: it looks
        through a copy, since shards are opened and released meanwhile."""
        for name, shard in tuple(self.shards.items()):
            if name.rpartition(".")[0] == group:
                return shard
        return None

    def send(self, message: object) -> bool:
        """Send the decider a message. Returns whether it is connected."""
        return self._send(WorkerMessage(Raw(pack(message))))

    # The connection

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError) as error:
                if not self._closed.is_set():
                    log.warning("A connection of a decider was refused: %s", error)
                continue
            with self._sending:
                self._connection = connection
                if self._closed.is_set():  # `close` has not seen this connection
                    shut(connection)
            self._serve(connection)
            with self._sending:
                self._connection = None
                connection.close()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        try:
            while True:
                request = read(connection.recv_bytes(FRAME_BYTES_MAX), _REQUESTS)
                method = method_of(request)
                arguments = method.arguments(request.arguments)
                self._submit(request, method, arguments)
        except (OSError, EOFError, RuntimeError, Malformed) as error:
            if not self._closed.is_set():
                log.info("The connection of the decider has ended: %r", error)

    def _submit(self, request: Request, method: Method[Any], arguments: dict[str, Any]) -> None:
        """Raises RuntimeError once this is closed or the interpreter ends: nothing is queued then."""
        try:
            self._threads.submit(self._answer, request, method, arguments)
        except RuntimeError as error:
            if self._closed.is_set() or "start new thread" not in str(error):
                raise
            # No thread can be started now. It is in the queue: one that there is carries it out, or one
            # that is started later.
            log.warning("%s of shard %s waits for a thread: %s", method.name, request.shard, error)

    def _send(self, message: Answer | Changed | WorkerMessage) -> bool:
        raw = pack(message)
        with self._sending:
            if self._connection is None:
                return False
            try:
                self._connection.send_bytes(raw)
            except (OSError, ValueError):
                return False
        return True

    def _answer(self, request: Request, method: Method[Any], arguments: dict[str, Any]) -> None:
        own: dict[str, Callable[..., object]] = {
            "open": self._open,
            "move": self._move,
            "renew": self._renew,
            "release": self._release,
        }
        try:
            if method.name in own:
                found = own[method.name](request.shard, **arguments)
            else:
                found = getattr(self.shards[request.shard], method.name)(**arguments)
            state = self._state(request.shard)
        except Exception:
            log.exception("%s of shard %s failed", method.name, request.shard)
            found, state = None, None
        self._send(Answer(request.number, request.shard, state, Raw(pack(found))))

    def _state(self, name: str) -> State:
        shard = self.shards.get(name)
        with self._lock:
            if shard is None:
                return State(next(self._numbers), None, False, "another process has it", 0, 0)
            return State(
                next(self._numbers),
                shard.slots,
                shard.is_open,
                shard.lost_because,
                shard.moves,
                shard.memory_resets,
                shard.has_former_homes,
                shard.former_homes,
            )

    # Methods that name homes

    def _open(
        self,
        name: str,
        home: HomeSpec,
        notes: str | None,
        path: PathSpec | None,
        earlier_homes: list[tuple[str, str]],
    ) -> bool:
        with self._lock:
            shard, here = self.shards.get(name), self._home(name, home)
            if shard is None:
                earlier = [replace(here, address=address, shard=at) for address, at in earlier_homes]
                directory = Path(notes) if notes else None
                shard = self.shards[name] = Shard(name, here, directory, path, earlier)
                shard.on_change = lambda: self._report(name)
        return shard.open()

    def _release(self, name: str) -> bool:
        """Close it for good: whoever opens one of this name later gets another."""
        with self._lock:
            shard = self.shards.pop(name, None)
        if shard:
            shard.close()
        return True

    def _move(self, name: str, home: HomeSpec, pull: PullSpec, path: PathSpec | None) -> bool:
        new = self._home(name, home)
        control = self._control(name, pull.control) if pull.control else None
        slot_pull = SlotPull(control, home.shard, pull.source, pull.source_shard, home.driver)
        return self.shards[name].move(new, slot_pull, path)

    def _renew(self, name: str, home: HomeSpec, capability: str | None) -> None:
        """All homes of a shard are reached with the credentials that were received last."""
        self._credentials[name] = Credentials(home.driver, home.secret, certified=home.certificate)
        if capability is not None:
            self._capabilities[name] = capability

    def _home(self, name: str, home: HomeSpec) -> Home:
        self._renew(name, home, None)
        return Home(home.address, home.shard, lambda: self._credentials[name], home.slot_bytes)

    def _control(self, name: str, told: ControlSpec) -> AgentControl:
        def context() -> ssl.SSLContext | None:
            certified = self._credentials[name].certified
            return certified.context if certified else None

        capability = None
        if told.capability is not None:
            self._capabilities[name] = told.capability
            capability = partial(self._capabilities.__getitem__, name)
        return AgentControl(told.url, told.token, capability, told.key, context)

    def _report(self, name: str) -> None:
        self._send(Changed(name, self._state(name)))
