"""Brains ask a driver to recall a prompt from tier 2 while its request waits in their queue.

A brain adds the keys of the prompt to a stream of the driver in Redis, which no other driver may write.
They are made with the org's secret, so that they name nothing but columns of that org. The driver brings
what tier 2 has of them into memory, as for a conversation that continues; nobody waits for an answer.
A brain may also name a sibling that has them in memory, as its map says: then they are borrowed there.

Nothing of a request is signed. So it is not trusted: what it may cost is bounded, for each org and in
all, and loads that engines wait for go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from swdriver_shim.cache_map.codec import Space
from swdriver_shim.keys import KEY_BYTES
from swdriver_shim.lending import KEYS_MAX
from telemetry.decoder import Limits, Malformed, Seconds, unpack

VERSION: Final = 1
VERSION_WITH_SIBLING: Final = 2
STREAM_LENGTH_MAX: Final = 256
LATE_SECONDS_MAX: Final = 10.0  # after which the request is served, or gone
OF_ORG_A_SECOND: Final = 8  # that are carried out
OF_ORG_AT_ONCE: Final = 32
SPACES_MAX: Final = 1024  # whose requests are counted
_LIMITS: Final = Limits(1 << 18)


class Recalled(StrEnum):
    """What became of a request, as `swdriver_recall_requests_total` counts it."""

    ASKED = "asked"  # tier 2 is, or the sibling
    UNKNOWN = "unknown"  # the driver doesn't serve this org
    NO_SIBLING = "no_sibling"  # it may not borrow from the driver that was named
    BUSY = "busy"  # too much is recalled or borrowed, or the org has no tier 2
    TOO_MANY = "too_many"  # of this org
    LATE = "late"
    MALFORMED = "malformed"


class RecallRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """`space`: the isolation tag, and 8 bytes of the digest of the namespace. `keys`: of the prompt's
    columns from the first one on, joined. `sibling`: the driver to borrow them from; empty to recall
    them from tier 2."""

    version: Annotated[int, Meta(ge=1, le=1 << 16)]
    at: Seconds
    space: Space
    keys: Annotated[bytes, Meta(max_length=KEYS_MAX * KEY_BYTES)]
    sibling: Annotated[str, Meta(max_length=200)] = ""

    def encode(self) -> bytes:
        """Older drivers know of no siblings, and take what names none."""
        fields = msgspec.structs.astuple(self)
        return _ENCODER.encode(fields if self.sibling else fields[:-1])


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(RecallRequest)


def decode(raw: bytes) -> RecallRequest:
    """Raises Malformed."""
    asked = unpack(raw, _DECODER, _LIMITS, has_bounds=True)
    version = VERSION_WITH_SIBLING if asked.sibling else VERSION
    if asked.version != version or len(asked.keys) % KEY_BYTES:
        raise Malformed("It is no request to recall of this version")
    return asked


def request(space: bytes, keys: Sequence[bytes], wall: float, sibling: str = "") -> bytes:
    """A request to recall the prompt with these keys, or to borrow them; the first are taken if there
    are too many."""
    version = VERSION_WITH_SIBLING if sibling else VERSION
    return RecallRequest(version, wall, space, b"".join(keys[:KEYS_MAX]), sibling).encode()


class Allowances:
    """How many requests each space may still make now: some at once, and then so many a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._full_at: OrderedDict[bytes, float] = OrderedDict()  # when all may be made at once again

    def take(self, space: bytes) -> bool:
        now = self._clock()
        full_at = max(now, self._full_at.get(space, now)) + 1 / OF_ORG_A_SECOND
        if full_at - now > OF_ORG_AT_ONCE / OF_ORG_A_SECOND:
            return False
        self._full_at[space] = full_at
        self._full_at.move_to_end(space)
        if len(self._full_at) > SPACES_MAX:
            self._full_at.popitem(last=False)
        return True
