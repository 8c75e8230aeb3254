"""What a driver shows to an agent instead of the agent's token: leave to fetch the slots of one move.

    text = issue(capability, authority.sign)         # the console
    capability = read(text, authorities, now)        # the agent that it is for

A capability says all of what it allows: who (by its key), where, which shard from which source, which
slots, and until when. It is signed by the console's authority and of no use for anything else. The same
capability is the same text, so a desired document changes only when what it allows does.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from cryptography import x509
from msgspec import Meta, Struct

from kvss_agent.data_plane.constants import SLOTS_MAX
from kvss_agent.security.certificates import signed_by_authority
from telemetry.decoder import MESSAGE, Malformed, decode

PREFIX: Final = "tgp_"
# Before what is signed: it is no certificate, and no signature of a process (`identity.CONTEXT`).
CONTEXT: Final = b"tidegate capability 1\0"
TEXT_MAX: Final = 4000
LIFE_SECONDS_MAX: Final = 3600

Name = Annotated[str, Meta(min_length=1, max_length=300)]


class NotAllowed(Exception):
    """Why a capability does not allow this, in a sentence."""


class Capability(Struct, frozen=True, forbid_unknown_fields=True):
    """Leave for `holder` to have `audience` pull slots 0 to `slots` - 1 of a shard from its old home."""

    audience: Name  # node:ax-2
    holder: Name  # driver:job7
    holder_key: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    shard: Name  # at the audience
    source: Annotated[str, Meta(min_length=1, max_length=500)]  # its address
    source_shard: Name
    slots: Annotated[int, Meta(ge=0, le=SLOTS_MAX)]
    expires_at: Annotated[int, Meta(ge=0, le=1 << 40)]  # seconds since 1970

    @property
    def driver(self) -> str:
        return self.holder.removeprefix("driver:")


_DECODER: Final = msgspec.json.Decoder(Capability)


def issue(capability: Capability, sign: Callable[[bytes], bytes]) -> str:
    """`sign`: by the authority, ECDSA with SHA-256, deterministic."""
    content = msgspec.json.encode(capability, order="deterministic")
    return f"{PREFIX}{_text(content)}.{_text(sign(CONTEXT + content))}"


def is_one(text: str) -> bool:
    return text.startswith(PREFIX)


def read(text: str, authorities: Sequence[x509.Certificate], now: datetime | None = None) -> Capability:
    """Raises NotAllowed for one that is not signed by an authority, or is over."""
    at = now or datetime.now(UTC)
    if len(text) > TEXT_MAX:
        raise NotAllowed("This is not a capability.")
    try:
        raw, _, signature = text.removeprefix(PREFIX).partition(".")
        content = _bytes(raw)
        is_signed = signed_by_authority(authorities, CONTEXT + content, _bytes(signature), at)
    except ValueError as error:
        raise NotAllowed("This is not a capability.") from error
    if not is_signed:
        raise NotAllowed("The capability is not signed by an authority that this agent knows.")
    try:
        capability = decode(content, _DECODER, MESSAGE)
    except Malformed as error:
        raise NotAllowed("The capability has another version.") from error
    left = capability.expires_at - at.timestamp()
    if left <= 0:
        raise NotAllowed("The capability has expired.")
    if left > LIFE_SECONDS_MAX:
        raise NotAllowed("The capability is valid for too long.")
    return capability


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
