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
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from kvss_agent.client import TIER_SECONDS, Credentials, Miss, Purged
from swdriver_shim.moving.agents import Control
from swdriver_shim.moving.homes import Home, Pulling
from swdriver_shim.moving.paths import Carried, PathSpec
from swdriver_shim.moving.shard import Back, Copy, Shard
from swdriver_shim.moving.slowest import Slow

log = logging.getLogger(__name__)

FRAME_BYTES_MAX: Final = 8 << 20
THREADS_MAX: Final = 64
ANSWER_SECONDS_MAX: Final = 3 * TIER_SECONDS  # of a worker that lives; tier 2 is slow sometimes
MOVE_SECONDS_MAX: Final = 24 * 3600.0
SECRET_BYTES: Final = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker listens, and the secret to be let in."""

    path: str
    secret: str


# What is asked. Each is answered with what the method of `Shard` returns.


class Open(Struct, frozen=True, tag=True):
    address: str
    shard: str
    driver: str
    secret: bytes
    slot_bytes: int
    notes: str | None
    path: PathSpec | None


class Clear(Struct, frozen=True, tag=True):
    slots: list[int]
    scrub: bool


class Kept(Struct, frozen=True, tag=True):
    columns: list[tuple[bytes, bytes]]


class Spill(Struct, frozen=True, tag=True):
    columns: list[Copy]
    data_key: bytes


class Recall(Struct, frozen=True, tag=True):
    columns: list[Back]
    data_key: bytes


class Forget(Struct, frozen=True, tag=True):
    columns: list[tuple[bytes, bytes]]


class Purge(Struct, frozen=True, tag=True):
    isolation_tag: bytes


class Applied(Struct, frozen=True, tag=True):
    seconds: float


class CountFrom(Struct, frozen=True, tag=True):
    pass


class LeftToMove(Struct, frozen=True, tag=True):
    pass


class Move(Struct, frozen=True, tag=True):
    address: str
    shard: str
    driver: str
    secret: bytes
    slot_bytes: int
    control: tuple[str, str] | None
    source: str
    source_shard: str
    path: PathSpec | None


class Take(Struct, frozen=True, tag=True):
    path: PathSpec | None


class CountCarried(Struct, frozen=True, tag=True):
    pass


class TakeSlowest(Struct, frozen=True, tag=True):
    pass


What = (
    Open
    | Clear
    | Kept
    | Spill
    | Recall
    | Forget
    | Purge
    | Applied
    | CountFrom
    | LeftToMove
    | Move
    | Take
    | CountCarried
    | TakeSlowest
)


class Request(Struct, frozen=True):
    number: int
    shard: Annotated[str, Meta(max_length=500)]
    what: What


class State(Struct, frozen=True):
    """How a shard is. A higher number is newer, whichever comes first."""

    number: int
    slots: int | None
    is_open: bool
    lost_because: str
    moves: int
    lives: int


class Answer(Struct, frozen=True, tag=True):
    number: int
    shard: str
    state: State | None  # None: there is no such shard, or it has failed
    body: Raw


class Changed(Struct, frozen=True, tag=True):
    """A shard is not as it was."""

    shard: str
    state: State


class Told(Struct, frozen=True, tag=True):
    """What the worker has to say of its own accord."""

    body: Raw


_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer | Changed | Told)
_pack: Final = msgspec.msgpack.Encoder().encode


class MovingHalf:
    """The shards of one worker, at the disposal of whoever decides. `shards` by their names: those that
    were opened so far."""

    def __init__(self) -> None:
        self.shards: dict[str, Shard] = {}
        self._credentials: dict[str, Credentials] = {}  # by shard, as they were told last
        self._directory = Path(tempfile.mkdtemp(prefix="tidegate-"))  # nobody else may enter it
        secret = secrets.token_bytes(SECRET_BYTES)
        path = str(self._directory / "worker.sock")
        self.place = Place(path, base64.b64encode(secret).decode())
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
            _shut(self._line)
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
        return self._send(Told(Raw(_pack(what))))

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
                    _shut(line)
            self._serve(line)
            with self._sending:
                self._line = None
                line.close()

    def _serve(self, line: Connection[Any, Any]) -> None:
        try:
            while True:
                request = _REQUESTS.decode(line.recv_bytes(FRAME_BYTES_MAX))
                self._threads.submit(self._answer, request)
        except (OSError, EOFError, RuntimeError, msgspec.MsgspecError) as error:
            if not self._closed.is_set():
                log.info("Whoever decides is gone: %r", error)

    def _send(self, what: Answer | Changed | Told) -> bool:
        raw = _pack(what)
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
        self._send(Answer(request.number, request.shard, state, Raw(_pack(found))))

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
                shard = self.shards[name] = Shard(name, home, notes, what.path)
                shard.on_line = lambda: self._say_changed(name)
        return shard.open()

    def _home(self, name: str, what: Open | Move) -> Home:
        """Wherever it is by then, it is reached with the credentials that were told last."""
        self._credentials[name] = Credentials(what.driver, what.secret)
        return Home(what.address, what.shard, lambda: self._credentials[name], what.slot_bytes)

    def _moved(self, name: str, shard: Shard, what: Move) -> bool:
        home = self._home(name, what)
        control = Control(*what.control) if what.control else None
        pulling = Pulling(control, what.shard, what.source, what.source_shard, what.driver)
        return shard.move(home, pulling, what.path)

    def _say_changed(self, name: str) -> None:
        self._send(Changed(name, self._state(name)))


class Line:
    """The way to one worker. All methods may be called from any thread."""

    def __init__(self, place: Place, on_told: Callable[[Raw], None]) -> None:
        """`on_told` hears what the worker says, in a thread of ours. Raises OSError."""
        self._on_told = on_told
        secret = base64.b64decode(place.secret)
        self._line: Connection[Any, Any] = Client(place.path, "AF_UNIX", authkey=secret)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Answer]] = {}
        self._shards: dict[str, FarShard] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="worker", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        self._hang_up()
        self._thread.join()

    def add(self, shard: FarShard) -> None:
        self._shards[shard.name] = shard

    def ask(self, shard: str, what: What, kind: type[T], seconds: float) -> T | None:
        """What the worker answers; None if it can't, or is gone."""
        answer: Future[Answer] = Future()
        with self._lock:
            if self._is_closed:
                return None
            number = next(self._numbers)
            self._waiting[number] = answer
        try:
            with self._sending:
                self._line.send_bytes(_pack(Request(number, shard, what)))
            found = answer.result(seconds)
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            log.warning("A worker does not answer: %r", error)
            return None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        return None if found.state is None else msgspec.msgpack.decode(found.body, type=kind)

    def _listen(self) -> None:
        try:
            while True:
                self._hear(_ANSWERS.decode(self._line.recv_bytes(FRAME_BYTES_MAX)))
        except (OSError, EOFError, TypeError, msgspec.MsgspecError) as error:
            if not self._is_closed:
                log.warning("A worker is gone: %r", error)
        self._hang_up()
        self._line.close()

    def _hear(self, what: Answer | Changed | Told) -> None:
        if isinstance(what, Told):
            try:
                self._on_told(what.body)
            except Exception:
                log.exception("What a worker has told could not be followed")
            return
        shard = self._shards.get(what.shard)
        if shard and what.state:
            shard.is_now(what.state)
        if isinstance(what, Answer):
            with self._lock:
                waiting = self._waiting.pop(what.number, None)
            if waiting:
                waiting.set_result(what)

    def _hang_up(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(EOFError("it is gone"))
        _shut(self._line)
        for shard in self._shards.values():
            shard.on_line()


class FarShard:
    """A shard that a worker holds: does what is asked of a `Shard` and needs no bytes. See there."""

    def __init__(
        self,
        name: str,
        line: Line,
        home: Home,
        notes: Path | None = None,
        path: PathSpec | None = None,
    ) -> None:
        self.name = name
        self._path = path
        self._carried: list[Carried] = []  # as the worker said last
        self._notes = str(notes) if notes else None
        self.on_line: Callable[[], None] = _nobody
        self._line = line
        self._home = home
        self._state = State(0, None, False, "not connected yet", 0, 0)
        self._lock = threading.Lock()
        line.add(self)

    def is_now(self, state: State) -> None:
        """The worker says how it is."""
        with self._lock:
            before = self._state
            if state.number <= before.number:
                return
            self._state = state
        if msgspec.structs.replace(state, number=0) != msgspec.structs.replace(before, number=0):
            self.on_line()

    @property
    def slots(self) -> int | None:
        return self._state.slots if self._line.is_open else None

    @property
    def is_open(self) -> bool:
        return self._line.is_open and self._state.is_open

    @property
    def lost_because(self) -> str:
        return self._state.lost_because if self._line.is_open else "its worker is gone"

    @property
    def moves(self) -> int:
        return self._state.moves

    @property
    def lives(self) -> int:
        return self._state.lives

    @property
    def count_from(self) -> int:
        return self._ask(CountFrom(), int, 0)

    @property
    def left_to_move(self) -> int:
        return self._ask(LeftToMove(), int, 0)

    @property
    def carried(self) -> Sequence[Carried]:
        self._carried = self._ask(CountCarried(), list[Carried], self._carried)
        return self._carried

    def take_slowest(self) -> Sequence[Slow]:
        return self._ask(TakeSlowest(), list[Slow], [])

    def open(self) -> bool:
        home = self._home
        credentials = home.credentials()
        secret = credentials.secret or b""
        what = Open(
            home.address,
            home.shard,
            credentials.driver,
            secret,
            home.slot_bytes,
            self._notes,
            self._path,
        )
        return self._ask(what, bool, False)

    def clear(self, slots: Sequence[int], *, scrub: bool) -> bool:
        return self._ask(Clear(list(slots), scrub), bool, False)

    def kept(self, columns: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        return self._ask(Kept(list(columns)), list[bool], [False] * len(columns))

    def spill(self, columns: Sequence[Copy], data_key: bytes = b"") -> list[bool]:
        return self._ask(Spill(list(columns), data_key), list[bool], [False] * len(columns))

    def recall(self, columns: Sequence[Back], data_key: bytes = b"") -> list[int | Miss]:
        lost: list[int | Miss] = [Miss.LOST] * len(columns)
        kind: Any = list[int | Miss]
        return self._ask(Recall(list(columns), data_key), kind, lost)

    def forget(self, columns: Sequence[tuple[bytes, bytes]]) -> bool:
        return self._ask(Forget(list(columns)), bool, False)

    def purge(self, tag: bytes) -> Purged | None:
        kind: Any = Purged | None
        found: Purged | None = self._ask(Purge(tag), kind, None)
        return found

    def applied(self, seconds: float) -> bool:
        return self._ask(Applied(seconds), bool, False)

    def take(self, path: PathSpec | None) -> None:
        self._path = path  # for a worker that opens it later
        self._ask(Take(path), object, None)

    def move(self, connect: Home, pull: Pulling, path: PathSpec | None = None) -> bool:
        credentials = connect.credentials()
        control = (pull.control.url, pull.control.token) if pull.control else None
        what = Move(
            connect.address,
            connect.shard,
            credentials.driver,
            credentials.secret or b"",
            connect.slot_bytes,
            control,
            pull.source,
            pull.source_shard,
            path,
        )
        is_there = self._ask(what, bool, False, MOVE_SECONDS_MAX)
        if is_there:
            self._home, self._path = connect, path
        return is_there

    def close(self) -> None:
        """The worker's shard stays with the worker."""

    def _ask(self, what: What, kind: type[T], otherwise: T, seconds: float = ANSWER_SECONDS_MAX) -> T:
        found = self._line.ask(self.name, what, kind, seconds)
        return otherwise if found is None else found


def _shut(line: Connection[Any, Any] | None) -> None:
    """Whoever reads from it finds it at its end, and closes it."""
    with contextlib.suppress(OSError):
        if line and not line.closed:
            with socket.socket(fileno=os.dup(line.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)


def _nobody() -> None:
    """Nobody has to be told."""
