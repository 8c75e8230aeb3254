"""The slowest transfers of a driver, as they come with its numbers. No Django.

A histogram says that something was slow; these say what: which stream, which slots, on which path, for
whom. They travel in a field of their own beside the record of that second, so that whoever knows nothing
of them reads the record as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from telemetry.decoder import unpack
from telemetry.records import FIELD_LIMITS, NO_NUL

FIELD: Final = b"slowest"
INTERVAL_SECONDS: Final = 10  # of which each the slowest are told: as long as a step of a chart
TRANSFERS_MAX: Final = 64  # of one driver and interval

Text = Annotated[str, Meta(max_length=200, pattern=NO_NUL)]
# Those of the console's orgs and nodes.
OrgName = Annotated[str, Meta(pattern=r"\A[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?\Z")]
NodeName = Annotated[str, Meta(pattern=r"\A([a-z0-9][a-z0-9._-]{0,62})?\Z")]  # empty if it is not known
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Transfer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One batch of columns of one org, out to a node or in from it."""

    at: Annotated[float, Meta(ge=0, lt=1 << 33)]  # when it was over, in seconds since 1970
    seconds: Annotated[float, Meta(ge=0, lt=86_400)]
    direction: Literal["out", "in"]
    org: OrgName
    request: Text  # what it was for, where that has a name
    stream: Text
    slot_first: Count
    slot_last: Count
    columns: Count
    bytes: Count
    session: Text
    node: NodeName
    tier: Text
    nic_leaf: Text
    link: Text


TakeSlowest = Callable[[], Sequence[Transfer]]

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Annotated[list[Transfer], Meta(max_length=TRANSFERS_MAX)])


def encode(transfers: Sequence[Transfer]) -> bytes:
    """The slowest of them, as many as go at once."""
    slowest = sorted(transfers, key=lambda one: one.seconds)[-TRANSFERS_MAX:]
    return _ENCODER.encode(slowest)


def decode(fields: Mapping[bytes, bytes]) -> list[Transfer]:
    """Raises ValueError for what are none of this version."""
    raw = fields.get(FIELD)
    if raw is None:
        return []
    return unpack(raw, _DECODER, FIELD_LIMITS, has_bounds=True)
