"""What a decider and a worker say to each other (`halves`), and how their line is ended."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, field

from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.shard import RecallColumn, SpillColumn
from telemetry.decoder import Limits, unpack

FRAME_BYTES_MAX: Final = 8 << 20
FRAME: Final = Limits(FRAME_BYTES_MAX)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerAddress:
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
    former: list[tuple[str, str]] = field(default_factory=list)  # addresses and shards


class Clear(Struct, frozen=True, tag=True):
    slots: list[int]
    scrub: bool


class Kept(Struct, frozen=True, tag=True):
    columns: list[tuple[bytes, bytes]]


class Spill(Struct, frozen=True, tag=True):
    columns: list[SpillColumn]
    data_key: bytes


class Recall(Struct, frozen=True, tag=True):
    columns: list[RecallColumn]
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


class MayBeElsewhere(Struct, frozen=True, tag=True):
    isolation_tag: bytes | None


class EmptyFormerHomes(Struct, frozen=True, tag=True):
    scrub: bool


class ForgetRemoved(Struct, frozen=True, tag=True):
    addresses: list[str]


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
    | MayBeElsewhere
    | EmptyFormerHomes
    | ForgetRemoved
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
    has_former_homes: bool = False
    former_homes: list[str] = field(default_factory=list)


class Answer(Struct, frozen=True, tag=True):
    number: int
    shard: str
    state: State | None  # None: there is no such shard, or it has failed
    body: Raw


class Changed(Struct, frozen=True, tag=True):
    """A shard is not as it was."""

    shard: str
    state: State


class WorkerMessage(Struct, frozen=True, tag=True):
    """What the worker has to say of its own accord."""

    body: Raw


pack: Final = msgspec.msgpack.Encoder().encode


def read(raw: bytes | Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """What the other half has sent. Times may be infinite. Raises Malformed."""
    return unpack(bytes(raw), decoder, FRAME, has_bounds=True)


def shut(line: Connection[Any, Any] | None) -> None:
    """Whoever reads from it finds it at its end, and closes it."""
    with contextlib.suppress(OSError):
        if line and not line.closed:
            with socket.socket(fileno=os.dup(line.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
