"""The messages between a gateway and the picker, as values. `messages` has them as protobuf."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from inference_brain.picker.routing import Answer


class BodyMode(Enum):
    """How a gateway sends bodies."""

    NONE = auto()
    STREAMED = auto()  # piece by piece, each after the answer to the one before
    BUFFERED = auto()  # whole, after the answer to the headers
    FULL_DUPLEX = auto()  # piece by piece, without waiting; what is answered replaces it
    OTHER = auto()  # one that the picker cannot work with


class Side(Enum):
    REQUEST = auto()
    RESPONSE = auto()


@dataclass(frozen=True, slots=True)
class Head:
    """Pseudo headers (`:path`) are among the headers. `among`, `served`: what the gateway adds about
    endpoints. Modes: where the gateway does not tell them, those that the protocol demands."""

    side: Side
    headers: Mapping[str, str]
    ends: bool
    among: Collection[str] | None = None
    served: str | None = None
    request_mode: BodyMode = BodyMode.FULL_DUPLEX
    response_mode: BodyMode = BodyMode.FULL_DUPLEX


@dataclass(frozen=True, slots=True)
class Piece:
    side: Side
    data: bytes
    ends: bool


@dataclass(frozen=True, slots=True)
class Trailers:
    side: Side


Phase: TypeAlias = Head | Piece | Trailers


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes different about headers."""

    put: Mapping[str, str]
    drop: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class HeadReply:
    side: Side
    change: Change | None = None
    endpoints: str = ""  # for the gateway's metadata; empty: none was picked with this message


@dataclass(frozen=True, slots=True)
class PieceReply:
    """`data`: None: as it came. `streamed`: in full-duplex mode, where `data` is sent in place of all
    that came."""

    side: Side
    data: bytes | None = None
    ends: bool = False
    streamed: bool = False
    change: Change | None = None
    endpoints: str = ""


@dataclass(frozen=True, slots=True)
class TrailersReply:
    side: Side


@dataclass(frozen=True, slots=True)
class Immediate:
    """The client gets this answer, and no replica hears of the request."""

    answer: Answer


Reply: TypeAlias = HeadReply | PieceReply | TrailersReply | Immediate
