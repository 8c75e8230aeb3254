"""The decider's side of a worker: a connection to it, and a `RemoteShard` for each shard that it has."""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from kvss_agent.client import Lender, Miss, Purged
from swdriver_shim.data_plane.agent_control import AgentControl
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.paths import PathSpec, PathTraffic
from swdriver_shim.data_plane.shard.columns import RecallColumn, SpillColumn
from swdriver_shim.data_plane.slow_transfers import SlowTransfer
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
    pack,
    read,
    remote,
    shut,
)
from telemetry.decoder import Malformed

log = logging.getLogger(__name__)

MOVE_SECONDS_MAX: Final = 24 * 3600.0
LATE_SECONDS: Final = 0.05  # that a worker may answer after what it was told to wait for
RENEW_SECONDS: Final = 5.0  # between looks, during a move, at whether credentials have changed
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer | Changed | WorkerMessage)

T = TypeVar("T")


class WorkerConnection:
    """The connection to one worker. All methods may be called from any thread."""

    def __init__(self, address: WorkerAddress, on_message: Callable[[Raw], None]) -> None:
        """`on_message` is called with what the worker sends unasked, in a thread of ours. Raises
        OSError."""
        self._on_message = on_message
        secret = base64.b64decode(address.secret)
        self._connection: Connection[Any, Any] = Client(address.path, "AF_UNIX", authkey=secret)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Answer]] = {}
        self._shards: dict[str, RemoteShard] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._receive_all, name="worker", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        self._end()
        self._thread.join()

    def add(self, shard: RemoteShard) -> None:
        self._shards[shard.name] = shard

    def call(self, shard: str, method: Method[T], arguments: Raw, seconds: float) -> T | None:
        """Returns None if the worker can't carry it out, or is gone."""
        answer: Future[Answer] = Future()
        with self._lock:
            if self._is_closed:
                return None
            number = next(self._numbers)
            self._waiting[number] = answer
        try:
            with self._sending:
                self._connection.send_bytes(pack(Request(number, shard, method.name, arguments)))
            found = answer.result(seconds)
            return None if found.state is None else method.result(found.body)
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            log.warning("A worker does not answer %s: %r", method.name, error)
            return None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _receive_all(self) -> None:
        try:
            while True:
                self._receive(read(self._connection.recv_bytes(FRAME_BYTES_MAX), _ANSWERS))
        except (OSError, EOFError, TypeError, Malformed) as error:
            if not self._is_closed:
                log.warning("The connection to a worker is lost: %r", error)
        self._end()
        self._connection.close()

    def _receive(self, message: Answer | Changed | WorkerMessage) -> None:
        if isinstance(message, WorkerMessage):
            try:
                self._on_message(message.body)
            except Exception:
                log.exception("A message of a worker could not be handled")
            return
        shard = self._shards.get(message.shard)
        if shard and message.state:
            shard.set_state(message.state)
        if isinstance(message, Answer):
            with self._lock:
                waiting = self._waiting.pop(message.number, None)
            if waiting:
                waiting.set_result(message)

    def _end(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(EOFError("the connection is closed"))
        shut(self._connection)
        for shard in self._shards.values():
            shard.on_change()


class RemoteShard:
    """A shard that a worker has: `ShardControl`, see there for what each method does.

    Methods that are `remote` are carried out by the worker's `Shard`, or by its `WorkerServer`.
    """

    def __init__(
        self,
        name: str,
        connection: WorkerConnection,
        home: Home,
        notes: Path | None = None,
        path: PathSpec | None = None,
    ) -> None:
        self.name = name
        self.on_change: Callable[[], None] = lambda: None
        self.earlier_homes: Sequence[Home] = ()  # an earlier process may have left bytes there
        self._path = path
        self._notes = str(notes) if notes else None
        self._connection = connection
        self._home = home
        self._traffic: Sequence[PathTraffic] = ()  # as the worker said last
        self._state = State(0, None, False, "not connected yet", 0, 0)
        self._renewed: tuple[HomeSpec, str | None] | None = None  # as the worker knows them
        self._lock = threading.Lock()
        self._agents: tuple[Collection[str], Collection[str]] = (), ()  # as in `set_agents`
        self._has_opened = False  # the worker, which is told nothing of a shard that it does not have
        self._telling = threading.Lock()  # of agents and of the path, so that it has the last ones
        connection.add(self)

    def call(self, method: Method[T], arguments: Raw, seconds: float) -> T | None:
        return self._connection.call(self.name, method, arguments, seconds)

    # State

    def set_state(self, state: State) -> None:
        """Take over what the worker says, unless something newer has come before."""
        with self._lock:
            before = self._state
            if state.number <= before.number:
                return
            self._state = state
        if msgspec.structs.replace(state, number=0) != msgspec.structs.replace(before, number=0):
            self.on_change()

    @property
    def slots(self) -> int | None:
        return self._state.slots if self._connection.is_open else None

    @property
    def is_open(self) -> bool:
        return self._connection.is_open and self._state.is_open

    @property
    def lost_because(self) -> str:
        return self._state.lost_because if self._connection.is_open else "its worker is gone"

    @property
    def moves(self) -> int:
        return self._state.moves

    @property
    def memory_resets(self) -> int:
        return self._state.memory_resets

    @property
    def former_homes(self) -> list[str]:
        return self._state.former_homes

    @property
    def has_former_homes(self) -> bool:
        return self._state.has_former_homes

    # Connections and moves

    def open(self) -> bool:
        earlier = [(one.address, one.shard) for one in self.earlier_homes]
        is_open = self._open(_spec(self._home), self._notes, self._path, earlier)
        with self._telling:
            self._has_opened = True
            self._set_agents(*self._agents)
            self._set_path(self._path)  # it may be another one by now
        return is_open

    def close(self) -> None:
        """The worker's shard stays open: it is the worker's to close."""

    def release(self) -> bool:
        """Close the worker's shard as well, which leaves its note: another process is about to open it.
        Returns whether it is closed; so it is where the worker is gone. For whom no `open` is under way:
        to close a driver waits for those."""
        with self._telling:
            self._has_opened = False
        return self._release()

    @remote(name="release")
    def _release(self) -> bool:
        return not self._connection.is_open

    def move(self, home: Home, pull: SlotPull, path: PathSpec | None = None) -> bool:
        spec = PullSpec(_control(pull.control), pull.source, pull.source_shard)
        with self._renewing(pull.control):
            has_moved = self._move(_spec(home), spec, path)
        if has_moved:
            self._home, self._path = home, path
        return has_moved

    @contextlib.contextmanager
    def _renewing(self, control: AgentControl | None) -> Iterator[None]:
        """Send the worker credentials that change meanwhile: a move may take longer than the capability
        that it has begun with."""
        is_over = threading.Event()

        def renew() -> None:
            while not is_over.wait(RENEW_SECONDS):
                self._send_credentials(control)

        thread = threading.Thread(target=renew, name=f"renew {self.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _send_credentials(self, control: AgentControl | None = None) -> None:
        """Unless the worker knows them. It gets them with `open` and `move`; between these a certificate
        is renewed, and with it whom to believe."""
        told = _control(control)
        new = _spec(self._home), told.capability if told else None
        if new != self._renewed:
            self._renew(*new)
            self._renewed = new

    def set_path(self, path: PathSpec | None) -> None:
        with self._telling:
            self._path = path  # for a worker that opens it later
            if self._has_opened:
                self._set_path(path)

    @remote(name="open")
    def _open(
        self,
        home: HomeSpec,
        notes: str | None,
        path: PathSpec | None,
        earlier_homes: list[tuple[str, str]],
    ) -> bool:
        return False

    @remote(name="move", seconds=MOVE_SECONDS_MAX)
    def _move(self, home: HomeSpec, pull: PullSpec, path: PathSpec | None) -> bool:
        return False

    @remote(name="renew")
    def _renew(self, home: HomeSpec, capability: str | None) -> None: ...

    @remote(name="set_path")
    def _set_path(self, path: PathSpec | None) -> None: ...

    @remote()
    def count_from(self) -> int:
        return 0

    @remote()
    def left_to_move(self) -> int:
        return 0

    @remote()
    def may_be_elsewhere(self, tag: bytes | None) -> bool:
        return True

    def empty_former_homes(self, *, scrub: bool) -> None:
        self._send_credentials()  # one may come back after weeks
        self._empty_former_homes(scrub=scrub)

    @remote(name="empty_former_homes")
    def _empty_former_homes(self, *, scrub: bool) -> None: ...

    def set_agents(self, removed: Collection[str], moved: Collection[str]) -> None:
        with self._telling:
            self._agents = removed, moved  # for a worker that opens it later
            if self._has_opened:
                self._set_agents(removed, moved)

    @remote(name="set_agents")
    def _set_agents(self, removed: Collection[str], moved: Collection[str]) -> None: ...

    # Slots and tier 2

    @remote()
    def clear(self, slots: Sequence[int], *, scrub: bool) -> bool:
        return False

    @remote()
    def exists(self, columns: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        return [False] * len(columns)

    @remote()
    def spill(
        self, columns: Sequence[SpillColumn], data_key: bytes = b"", *, redundant: bool = False
    ) -> list[bool]:
        return [False] * len(columns)

    @remote()
    def recall(self, columns: Sequence[RecallColumn], data_key: bytes = b"") -> list[int | Miss]:
        return [Miss.LOST] * len(columns)

    @remote()
    def borrow(
        self, columns: Sequence[RecallColumn], slots: Sequence[int], lender: Lender
    ) -> list[Miss | None]:
        return [Miss.LOST] * len(columns)

    @remote()
    def delete(self, columns: Sequence[tuple[bytes, bytes]]) -> bool:
        return False

    @remote()
    def purge(self, tag: bytes) -> Purged | None:
        return None

    @remote(seconds=lambda seconds: seconds + LATE_SECONDS)
    def wait_applied(self, seconds: float) -> bool:
        return False

    # Metrics

    def traffic(self) -> Sequence[PathTraffic]:
        self._traffic = self._ask_traffic()
        return self._traffic

    @remote(name="traffic")
    def _ask_traffic(self) -> Sequence[PathTraffic]:
        return self._traffic

    @remote()
    def take_slowest(self) -> Sequence[SlowTransfer]:
        return []


def _spec(home: Home) -> HomeSpec:
    credentials = home.credentials()
    return HomeSpec(
        home.address,
        home.shard,
        credentials.driver,
        credentials.secret or b"",
        home.slot_bytes,
        credentials.certified,
    )


def _control(control: AgentControl | None) -> ControlSpec | None:
    if control is None:
        return None
    capability = control.capability() if control.capability else None
    return ControlSpec(control.url, control.token, capability, control.key)
