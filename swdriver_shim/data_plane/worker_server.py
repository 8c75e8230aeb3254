"""The driver in two processes: whoever decides has a `FarShard` for each `Shard` that a worker holds.

    moving = MovingHalf()                          # in the worker; it listens from here on
    moving.place                                   # goes to the decider, over a way that both trust

    line = Line(moving.place, on_told=…)           # in the process that decides
    driver = Decider(layout, "llama", [[FarShard("full.0", line, home)]])

The worker's `Shard` is the only writer of its slots, so that everything else that is done to them goes
through it as well: clears, what tier 2 copies and brings back, moves. No bytes of columns come this way;
those are between the worker and the agent. It is one Unix socket in a directory that only its user may
enter, with a secret besides, since data keys of orgs travel here. Both ends are started together and are
of one version, so there is nothing to negotiate.

A worker that is gone is a lost shard like any other: what is asked of it is not done, and nothing
raises.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import secrets
import shutil
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw

from kvss_agent.client import Credentials
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.worker_protocol import (
    FRAME_BYTES_MAX,
    Answer,
    Applied,
    Changed,
    Clear,
    CountCarried,
    CountFrom,
    EmptyFormerHomes,
    Forget,
    ForgetRemoved,
    Kept,
    LeftToMove,
    MayBeElsewhere,
    Move,
    Open,
    Purge,
    Recall,
    Request,
    Spill,
    State,
    Take,
    TakeSlowest,
    What,
    WorkerAddress,
    WorkerMessage,
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
    """The shards of one worker, at the disposal of whoever decides. `shards` by their names: those that
    were opened so far."""

    def __init__(self) -> None:
        self.shards: dict[str, Shard] = {}
        self._credentials: dict[str, Credentials] = {}  # by shard, as they were told last
        self._directory = Path(tempfile.mkdtemp(prefix="tidegate-"))  # nobody else may enter it
        secret = secrets.token_bytes(SECRET_BYTES)
        path = str(self._directory / "worker.sock")
        self.place = WorkerAddress(path, base64.b64encode(secret).decode())
        self._listener = Listener(path, "AF_UNIX", authkey=secret)
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="half")
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._line: Connection[Any, Any] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="half", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with self._sending:
            shut(self._line)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.connect(self.place.path)  # it may wait for somebody
        self._thread.join()
        self._listener.close()
        self._threads.shutdown()
        for shard in self.shards.values():
            shard.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def tell(self, what: object) -> bool:
        """Say something to whoever decides; whether anybody is there to hear it."""
        return self._send(WorkerMessage(Raw(pack(what))))

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                line = self._listener.accept()
            except (OSError, EOFError, AuthenticationError) as error:
                if not self._closed.is_set():
                    log.warning("Somebody was not let in: %s", error)
                continue
            with self._sending:
                self._line = line
                if self._closed.is_set():  # since then, and so nobody else ends it
                    shut(line)
            self._serve(line)
            with self._sending:
                self._line = None
                line.close()

    def _serve(self, line: Connection[Any, Any]) -> None:
        try:
            while True:
                request = read(line.recv_bytes(FRAME_BYTES_MAX), _REQUESTS)
                self._threads.submit(self._answer, request)
        except (OSError, EOFError, RuntimeError, Malformed) as error:
            if not self._closed.is_set():
                log.info("Whoever decides is gone: %r", error)

    def _send(self, what: Answer | Changed | WorkerMessage) -> bool:
        raw = pack(what)
        with self._sending:
            line = self._line
            if line is None:
                return False
            try:
                line.send_bytes(raw)
            except (OSError, ValueError):
                return False
        return True

    def _answer(self, request: Request) -> None:
        try:
            found: Any = self._done(request.shard, request.what)
            state = self._state(request.shard)
        except Exception:
            log.exception("A shard has failed at %s", type(request.what).__name__)
            found, state = None, None
        self._send(Answer(request.number, request.shard, state, Raw(pack(found))))

    def _state(self, name: str) -> State:
        shard = self.shards[name]
        with self._lock:
            return State(
                next(self._numbers),
                shard.slots,
                shard.is_open,
                shard.lost_because,
                shard.moves,
                shard.lives,
                shard.has_former_homes,
                shard.former_homes,
            )

    def _done(self, name: str, what: What) -> object:
        if isinstance(what, Open):
            return self._opened(name, what)
        shard = self.shards[name]
        match what:
            case Clear():
                return shard.clear(what.slots, scrub=what.scrub)
            case Kept():
                return shard.kept(what.columns)
            case Spill():
                return shard.spill(what.columns, what.data_key)
            case Recall():
                return shard.recall(what.columns, what.data_key)
            case Forget():
                return shard.forget(what.columns)
            case Purge():
                return shard.purge(what.isolation_tag)
            case Applied():
                return shard.applied(what.seconds)
            case CountFrom():
                return shard.count_from
            case LeftToMove():
                return shard.left_to_move
            case Move():
                return self._moved(name, shard, what)
            case Take():
                shard.take(what.path)
            case MayBeElsewhere():
                return shard.may_be_elsewhere(what.isolation_tag)
            case EmptyFormerHomes():
                shard.empty_former_homes(scrub=what.scrub)
            case ForgetRemoved():
                shard.forget_removed(what.addresses)
            case CountCarried():
                return shard.carried
            case TakeSlowest():
                return shard.take_slowest()
        return None

    def _opened(self, name: str, what: Open) -> bool:
        with self._lock:
            shard, home = self.shards.get(name), self._home(name, what)
            if shard is None:
                notes = Path(what.notes) if what.notes else None
                former = [replace(home, address=address, shard=place) for address, place in what.former]
                shard = self.shards[name] = Shard(name, home, notes, what.path, former)
                shard.on_line = lambda: self._say_changed(name)
        return shard.open()

    def _home(self, name: str, what: Open | Move) -> Home:
        """Wherever it is by then, it is reached with the credentials that were told last."""
        self._credentials[name] = Credentials(what.driver, what.secret)
        return Home(what.address, what.shard, lambda: self._credentials[name], what.slot_bytes)

    def _moved(self, name: str, shard: Shard, what: Move) -> bool:
        home = self._home(name, what)
        control = AgentControl(*what.control) if what.control else None
        pulling = SlotPull(control, what.shard, what.source, what.source_shard, what.driver)
        return shard.move(home, pulling, what.path)

    def _say_changed(self, name: str) -> None:
        self._send(Changed(name, self._state(name)))
