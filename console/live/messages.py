"""Messages on the wire: frames to clients, and requests of clients. No Django.

Each frame is encoded once, however many viewers get it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Annotated, Any, Final, Literal

import msgspec

from telemetry.decoder import Limits, Malformed, decode

VERSION: Final = 1
SUBPROTOCOL: Final = "tidegate.v1"
MESSAGE_BYTES_MAX: Final = 4096
LIMITS: Final = Limits(4 * MESSAGE_BYTES_MAX, items_max=16, depth_max=4)
TOPIC_PATTERN: Final = r"^[a-z]+(:[A-Za-z0-9._-]{1,200})?$"

Kind = Literal["snapshot", "delta", "heartbeat", "gap", "error"]
# Python's $ would let a line's end pass.
Topic = Annotated[str, msgspec.Meta(pattern=TOPIC_PATTERN.replace("$", r"\Z"), max_length=240)]


class Closing(IntEnum):
    """Why a connection was ended by us; 4000 and more are an application's own."""

    NOT_NOW = 1013
    OUR_FAULT = 1011
    UNKNOWN = 4401
    FORBIDDEN = 4403
    STALLED = 4408
    TOO_MANY_MESSAGES = 4429
    TOO_MANY_CONNECTIONS = 4430


REASONS: Final[Mapping[Closing, str]] = {
    Closing.NOT_NOW: "Too many clients, or PostgreSQL does not answer. Try again soon.",
    Closing.OUR_FAULT: "Reading failed. Connect again.",
    Closing.UNKNOWN: "Log in, or send a valid token.",
    Closing.FORBIDDEN: "You may no longer see one of these topics.",
    Closing.STALLED: "Frames were not read. Connect again.",
    Closing.TOO_MANY_MESSAGES: "Send fewer messages.",
    Closing.TOO_MANY_CONNECTIONS: "Too many live pages open. Close some.",
}


@dataclass(frozen=True, slots=True)
class Frame:
    topic: str
    kind: Kind
    text: str  # as it is sent
    concerns_access: bool = False  # who may see the topic may have changed


def frame(
    topic: str, kind: Kind, seq: int, now: float, data: object, *, concerns_access: bool = False
) -> Frame:
    said = {"v": VERSION, "seq": seq, "ts": moment(now), "topic": topic, "kind": kind, "data": data}
    return Frame(topic, kind, _ENCODER.encode(said).decode(), concerns_access)


def error(reason: str, detail: str, topic: str, now: float) -> Frame:
    """A message that was not followed. It counts for no sequence."""
    return frame(topic, "error", 0, now, {"reason": reason, "detail": detail})


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Subscribe(msgspec.Struct, tag="subscribe", tag_field="type", forbid_unknown_fields=True):
    """`since`: the number of the last event that is known, from a former connection."""

    topic: Topic
    since: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None


class Unsubscribe(msgspec.Struct, tag="unsubscribe", tag_field="type", forbid_unknown_fields=True):
    topic: Topic


class NotUnderstood(Exception):
    """Why not, in a sentence."""


def read(text: str | None) -> Subscribe | Unsubscribe:
    """A message of a viewer. Raises NotUnderstood, whatever it is."""
    if text is None:
        raise NotUnderstood("Send text, not bytes.")
    if len(text) > MESSAGE_BYTES_MAX:
        raise NotUnderstood(f"A message has at most {MESSAGE_BYTES_MAX} characters.")
    try:
        message: Subscribe | Unsubscribe = decode(text, _DECODER, LIMITS)
    except Malformed as problem:
        raise NotUnderstood(f"Not a message of this protocol: {problem}.") from None
    return message


def encoded(value: Any) -> bytes:
    return _ENCODER.encode(value)


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Subscribe | Unsubscribe)
