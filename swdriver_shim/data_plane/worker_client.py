"""A shard that a worker holds, for whoever decides in another process (`halves`)."""

from __future__ import annotations

import base64
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from kvss_agent.client import TIER_SECONDS, Miss, Purged
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.paths import PathSpec, PathTraffic
from swdriver_shim.data_plane.shard import RecallColumn, SpillColumn
from swdriver_shim.data_plane.slow_transfers import SlowTransfer
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

ANSWER_SECONDS_MAX: Final = 3 * TIER_SECONDS  # of a worker that lives; tier 2 is slow sometimes
MOVE_SECONDS_MAX: Final = 24 * 3600.0
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer | Changed | WorkerMessage)

T = TypeVar("T")


class WorkerConnection:
    """The way to one worker. All methods may be called from any thread."""

    def __init__(self, place: WorkerAddress, on_told: Callable[[Raw], None]) -> None:
        """`on_told` hears what the worker says, in a thread of ours. Raises OSError."""
        self._on_told = on_told
        secret = base64.b64decode(place.secret)
        self._line: Connection[Any, Any] = Client(place.path, "AF_UNIX", authkey=secret)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Answer]] = {}
        self._shards: dict[str, RemoteShard] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="worker", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        self._hang_up()
        self._thread.join()

    def add(self, shard: RemoteShard) -> None:
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
                self._line.send_bytes(pack(Request(number, shard, what)))
            found = answer.result(seconds)
            return None if found.state is None else read(found.body, msgspec.msgpack.Decoder(kind))
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            log.warning("A worker does not answer: %r", error)
            return None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _listen(self) -> None:
        try:
            while True:
                self._hear(read(self._line.recv_bytes(FRAME_BYTES_MAX), _ANSWERS))
        except (OSError, EOFError, TypeError, Malformed) as error:
            if not self._is_closed:
                log.warning("A worker is gone: %r", error)
        self._hang_up()
        self._line.close()

    def _hear(self, what: Answer | Changed | WorkerMessage) -> None:
        if isinstance(what, WorkerMessage):
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
        shut(self._line)
        for shard in self._shards.values():
            shard.on_line()


class RemoteShard:
    """A shard that a worker holds: does what is asked of a `Shard` and needs no bytes. See there."""

    def __init__(
        self,
        name: str,
        line: WorkerConnection,
        home: Home,
        notes: Path | None = None,
        path: PathSpec | None = None,
    ) -> None:
        self.name = name
        self._path = path
        self._carried: list[PathTraffic] = []  # as the worker said last
        self._notes = str(notes) if notes else None
        self.on_line: Callable[[], None] = _nobody
        self.former: Sequence[Home] = ()  # that an earlier life may have left bytes at
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
    def carried(self) -> Sequence[PathTraffic]:
        self._carried = self._ask(CountCarried(), list[PathTraffic], self._carried)
        return self._carried

    @property
    def former_homes(self) -> list[str]:
        return self._state.former_homes

    @property
    def has_former_homes(self) -> bool:
        return self._state.has_former_homes

    def may_be_elsewhere(self, tag: bytes | None) -> bool:
        return self._ask(MayBeElsewhere(tag), bool, True)

    def empty_former_homes(self, *, scrub: bool) -> None:
        self._ask(EmptyFormerHomes(scrub), object, None)

    def forget_removed(self, addresses: Collection[str]) -> None:
        self._ask(ForgetRemoved(sorted(addresses)), object, None)

    def take_slowest(self) -> Sequence[SlowTransfer]:
        return self._ask(TakeSlowest(), list[SlowTransfer], [])

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
            [(one.address, one.shard) for one in self.former],
        )
        return self._ask(what, bool, False)

    def clear(self, slots: Sequence[int], *, scrub: bool) -> bool:
        return self._ask(Clear(list(slots), scrub), bool, False)

    def kept(self, columns: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        return self._ask(Kept(list(columns)), list[bool], [False] * len(columns))

    def spill(self, columns: Sequence[SpillColumn], data_key: bytes = b"") -> list[bool]:
        return self._ask(Spill(list(columns), data_key), list[bool], [False] * len(columns))

    def recall(self, columns: Sequence[RecallColumn], data_key: bytes = b"") -> list[int | Miss]:
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

    def move(self, connect: Home, pull: SlotPull, path: PathSpec | None = None) -> bool:
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


def _nobody() -> None:
    """Nobody has to be told."""
