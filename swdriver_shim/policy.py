"""The policy of an org: one definition, for the console that edits it and for every driver.

A policy is for an org, or for an org and one model. A change applies to stored columns as well: the
policy is evaluated whenever a column is used, and never copied into it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from swdriver_shim.keys import COLUMN_TOKENS

TTL_SECONDS_MAX: Final = 400 * 24 * 3600
PRIORITY_MAX: Final = 100
PRIORITY: Final = 35  # by default
BYTES_MAX: Final = 1 << 60
STORE_TOKENS_MAX: Final = 1 << 30

Seconds = Annotated[int, Meta(ge=1, le=TTL_SECONDS_MAX)]
Bytes = Annotated[int, Meta(ge=0, le=BYTES_MAX)]
Tokens = Annotated[int, Meta(ge=0, le=STORE_TOKENS_MAX)]
Priority = Annotated[int, Meta(ge=0, le=PRIORITY_MAX)]
Share = Annotated[int, Meta(ge=1, le=1_000_000)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
DisplacementName = Literal["default", "lru", "lfu", "slru", "s3fifo", "arc", "cost"]

NEVER: Final = float("inf")


class Tiers(StrEnum):
    """Where columns of an org may be stored."""

    NONE = "none"
    DRAM = "dram"
    TIER2 = "dram+tier2"


class Tier2Rule(StrEnum):
    """Whether columns of a request may be copied to tier 2, if the org's policy allows it. Each is
    stricter than those before it."""

    ALLOWED = "allowed"
    ENCRYPTED = "encrypted"  # only where the policy encrypts tier 2
    NEVER = "never"  # memory only

    @property
    def strictness(self) -> int:
        return _STRICTNESS[self]


_STRICTNESS: Final = {rule: place for place, rule in enumerate(Tier2Rule)}


class TtlMode(StrEnum):
    """From when on a column's TTL counts."""

    NONE = "none"
    FIRST_USE = "first_use"
    LAST_USE = "last_use"
    BOTH = "both"


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One policy. The default is an hour from the last use, in DRAM only."""

    ttl_first_use_seconds: Seconds | None = None
    ttl_last_use_seconds: Seconds | None = 3600
    tiers: Tiers = Tiers.DRAM
    dram_bytes_max: Bytes | None = None  # never exceeded
    tier2_bytes_max: Bytes | None = None
    share: Share = 100  # a weight: columns of the org furthest above its share are displaced first
    priority: Priority = PRIORITY
    displacement: DisplacementName = "default"  # which columns make room
    encrypt_tier2: bool = False
    scrub: bool = False  # overwrite deleted, purged and expired columns
    store_tokens_max: Tokens | None = None  # of each prompt, from its start; whole units only
    redundant_from_priority: Priority | None = None  # in tier 2: columns of this priority or more

    def is_redundant(self, priority: int) -> bool:
        """Whether a column of this priority is stored redundantly in tier 2."""
        lowest = self.redundant_from_priority
        return lowest is not None and priority >= lowest

    @property
    def columns_max(self) -> int | None:
        """How many columns of a prompt are stored; None for all."""
        return None if self.store_tokens_max is None else self.store_tokens_max // COLUMN_TOKENS

    @property
    def ttl_mode(self) -> TtlMode:
        first, last = self.ttl_first_use_seconds is not None, self.ttl_last_use_seconds is not None
        if first and last:
            return TtlMode.BOTH
        return TtlMode.FIRST_USE if first else TtlMode.LAST_USE if last else TtlMode.NONE

    def expires_at(self, stored_at: float, used_at: float, ttl: int | None = None) -> float:
        """When a column of this age expires; NEVER for never. `ttl`: its own, which only shortens the
        policy's. It counts from the same time as the policy's, or from the last use if that has none.
        """
        first, last = self.ttl_first_use_seconds, self.ttl_last_use_seconds
        if ttl is not None:
            if first is None and last is None:
                last = ttl
            first = None if first is None else min(first, ttl)
            last = None if last is None else min(last, ttl)
        return min(
            NEVER if first is None else stored_at + first, NEVER if last is None else used_at + last
        )


class OrgPolicies(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An org's policy, and complete policies of single models in place of it."""

    policy: Policy = Policy()
    models: dict[Name, Policy] = field(default_factory=dict)

    def of(self, model: str) -> Policy:
        return self.models.get(model, self.policy)


class Rules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rules of one request. They can be stricter than the org's policy, never laxer."""

    no_store: bool = False
    store_tokens_max: Tokens | None = None  # as in the policy: the prefix that prompts share
    tier2: Tier2Rule = Tier2Rule.ALLOWED
    ttl_seconds: Seconds | None = None
    priority: Priority | None = None
    continue_id: Annotated[str, Meta(max_length=200)] = ""


AS_USUAL: Final = Rules()
