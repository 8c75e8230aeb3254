"""Messages between a decider and a worker, and the table of methods that a decider may call there.

A method is declared once, with `remote` on `RemoteShard`: its signature is what goes over the
connection, and its body is what the caller gets if the worker does not answer.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from multiprocessing.connection import Connection
from typing import (
    Annotated,
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Raw, Struct, field, structs

from kvss_agent.client import TIER_SECONDS
from kvss_agent.security.trust import ClientCertificate
from telemetry.decoder import Limits, Malformed, unpack

FRAME_BYTES_MAX: Final = 8 << 20
FRAME: Final = Limits(FRAME_BYTES_MAX)
ANSWER_SECONDS_MAX: Final = 3 * TIER_SECONDS  # of a live worker; tier 2 is slow at times

P = ParamSpec("P")
T = TypeVar("T")

pack: Final = msgspec.msgpack.Encoder(enc_hook=list).encode  # ranges and views of dictionaries as lists


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker listens, and the secret that it admits connections with."""

    path: str
    secret: str


class HomeSpec(Struct, frozen=True):
    """A `Home` with the credentials that are valid now."""

    address: str
    shard: str
    driver: str
    secret: bytes
    slot_bytes: int
    certificate: ClientCertificate | None = None


class ControlSpec(Struct, frozen=True):
    """An `AgentControl`, with the capability that is valid now if it has one in place of a token."""

    url: str
    token: str
    capability: str | None
    key: str


class PullSpec(Struct, frozen=True):
    """A `SlotPull`. `control`: the new agent's API."""

    control: ControlSpec | None
    source: str
    source_shard: str


class Request(Struct, frozen=True):
    number: int
    shard: Annotated[str, Meta(max_length=500)]
    method: Annotated[str, Meta(max_length=100)]
    arguments: Raw


class State(Struct, frozen=True):
    """The state of a shard. Of two states, the one with the higher number is newer."""

    number: int
    slots: int | None
    is_open: bool
    lost_because: str
    moves: int
    memory_resets: int
    has_former_homes: bool = False
    former_homes: list[str] = field(default_factory=list)


class Answer(Struct, frozen=True, tag=True):
    number: int
    shard: str
    state: State | None  # None: there is no such shard, or the method failed
    body: Raw


class Changed(Struct, frozen=True, tag=True):
    """The state of a shard has changed."""

    shard: str
    state: State


class WorkerMessage(Struct, frozen=True, tag=True):
    """A message that a worker sends without being asked."""

    body: Raw


class Method(Generic[T]):
    """A method that a worker carries out: how its arguments and its result are encoded."""

    def __init__(self, name: str, declared: Callable[..., T]) -> None:
        hints = get_type_hints(declared, include_extras=True)
        self.name = name
        result: type[T] = hints.pop("return")
        parameters = list(inspect.signature(declared).parameters.values())[1:]
        self._arguments = msgspec.defstruct(
            self.name,
            [
                (one.name, hints[one.name])
                if one.default is one.empty
                else (one.name, hints[one.name], one.default)
                for one in parameters
            ],
            frozen=True,
        )
        self._reader = msgspec.msgpack.Decoder(self._arguments)
        self._results = msgspec.msgpack.Decoder(result)

    def pack(self, *arguments: Any, **named: Any) -> Raw:
        return Raw(pack(self._arguments(*arguments, **named)))

    def arguments(self, raw: Raw) -> dict[str, Any]:
        """Raises Malformed."""
        return structs.asdict(read(raw, self._reader))

    def result(self, raw: Raw) -> T:
        """Raises Malformed."""
        return read(raw, self._results)


class Caller(Protocol):
    def call(self, method: Method[T], arguments: Raw, seconds: float) -> T | None:
        """What the worker answers; None if it does not."""


C = TypeVar("C", bound=Caller)
METHODS: Final[dict[str, Method[Any]]] = {}


def remote(
    *, name: str = "", seconds: float | Callable[..., float] = ANSWER_SECONDS_MAX
) -> Callable[[Callable[Concatenate[C, P], T]], Callable[Concatenate[C, P], T]]:
    """Declare a method that a worker carries out, under this name if it has another one there, and for
    how long a caller waits for its result, or what says so of its arguments."""

    def declare(declared: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
        called = name or declared.__name__
        method = METHODS[called] = Method(called, declared)

        @wraps(declared)
        def call(caller: C, /, *arguments: P.args, **named: P.kwargs) -> T:
            within = seconds(*arguments, **named) if callable(seconds) else seconds
            found = caller.call(method, method.pack(*arguments, **named), within)
            return declared(caller, *arguments, **named) if found is None else found

        return call

    return declare


def method_of(request: Request) -> Method[Any]:
    """Raises Malformed for a method that nobody has declared."""
    method = METHODS.get(request.method)
    if method is None:
        raise Malformed(f"there is no method {request.method}")
    return method


def read(raw: bytes | Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decode what the other process has sent. Times may be infinite. Raises Malformed."""
    return unpack(bytes(raw), decoder, FRAME, has_bounds=True)


def shut(connection: Connection[Any, Any] | None) -> None:
    """End a connection for both sides. The thread that reads from it closes it."""
    with contextlib.suppress(OSError):
        if connection and not connection.closed:
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
