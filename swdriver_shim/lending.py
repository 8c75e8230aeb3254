"""How drivers of one model lend each other columns: what one asks, and what the other answers.

A driver that misses a prompt asks a sibling for its columns by their keys, which only who has the org's
secret can name. The sibling says in which slots they are, and keeps them there for a while. Agents fetch
the bytes from each other, and check by the seal that each is the column that was asked for: whatever a
sibling says wrong costs a miss.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvss_agent.data_plane.constants import SLOTS_MAX
from kvss_agent.shard.seal import KEY_BYTES, TAG_BYTES
from swdriver_shim.layout import GROUPS_MAX
from swdriver_shim.policy import Tier2Rule
from telemetry.decoder import Limits

KEYS_MAX: Final = 1 << 13  # of one prompt: half a million tokens; what brains ask for as well
PATH: Final = "/v1/lend"
ASK_BYTES_MAX: Final = 1 << 18
ANSWER: Final = Limits(4 << 20, GROUPS_MAX * KEYS_MAX * 8)
_AGE_MAX: Final = 1 << 40


class LendBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`model`: what KV of the same tokens looks like, see `digest_of`. `tag`: the org's isolation tag.
    `keys`: of the prompt's columns from the first one on, joined. `start`: how many of those the
    borrower has."""

    model: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tag: Annotated[bytes, Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
    keys: Annotated[bytes, Meta(max_length=KEYS_MAX * KEY_BYTES)]
    start: Annotated[int, Meta(ge=0, le=KEYS_MAX)]


class LentColumn(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A column of a group, by its place in the prompt, and the slot that it is in at every shard. Ages
    are seconds; `ttl` is one of its own."""

    depth: Annotated[int, Meta(ge=0, lt=KEYS_MAX)]
    slot: Annotated[int, Meta(ge=0, lt=SLOTS_MAX)]
    stored_age: Annotated[float, Meta(ge=0, le=_AGE_MAX)]
    used_age: Annotated[float, Meta(ge=0, le=_AGE_MAX)]
    ttl: Annotated[int, Meta(ge=0)] | None = None
    tier2_rule: Tier2Rule = Tier2Rule.ALLOWED


class LentAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """What is lent of each group, in the layout's order."""

    groups: Annotated[
        tuple[Annotated[tuple[LentColumn, ...], Meta(max_length=KEYS_MAX)], ...],
        Meta(max_length=GROUPS_MAX),
    ]


def token_for(lender_secret: bytes, borrower: str) -> str:
    """What a borrower shows to a lender, whose secret the console knows, and the borrower does not."""
    return hmac.new(lender_secret, b"lend to " + borrower.encode(), hashlib.sha256).hexdigest()


def digest_of(model: Struct) -> str:
    """Of a model as its driver is told it: two drivers with the same one have the same KV."""
    return hashlib.sha256(msgspec.json.encode(model, order="deterministic")).hexdigest()
