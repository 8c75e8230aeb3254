"""What an org wants of its cache: one definition, for the console that edits it and for every driver.

A policy holds for an org, or for an org and one model. A change applies to what is stored already:
nothing of a policy is written into a column, it is looked at whenever a column is.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

TTL_SECONDS_MAX: Final = 400 * 24 * 3600
PRIORITY_MAX: Final = 100
PRIORITY: Final = 35  # where nobody says anything
BYTES_MAX: Final = 1 << 60

Seconds = Annotated[int, Meta(ge=1, le=TTL_SECONDS_MAX)]
Bytes = Annotated[int, Meta(ge=0, le=BYTES_MAX)]
Priority = Annotated[int, Meta(ge=0, le=PRIORITY_MAX)]
Share = Annotated[int, Meta(ge=1, le=1_000_000)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
DisplacementName = Literal["default", "lru", "lfu", "slru", "s3fifo", "cost"]

NEVER: Final = float("inf")


class Tiers(StrEnum):
    """Where columns of an org may lie."""

    NONE = "none"
    DRAM = "dram"
    TIER2 = "dram+tier2"


class TtlMode(StrEnum):
    """From when on a column's time to live counts."""

    NONE = "none"
    FIRST_USE = "first_use"
    LAST_USE = "last_use"
    BOTH = "both"


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One policy. What is not said has a safe value: an hour from the last use, DRAM only."""

    ttl_first_use_seconds: Seconds | None = None
    ttl_last_use_seconds: Seconds | None = 3600
    tiers: Tiers = Tiers.DRAM
    dram_bytes_max: Bytes | None = None  # never exceeded
    tier2_bytes_max: Bytes | None = None
    share: Share = 100  # of the memory, against the shares of others; who is over pays first
    priority: Priority = PRIORITY
    displacement: DisplacementName = "default"  # which columns make room
    encrypt_tier2: bool = False
    scrub: bool = False  # overwrite what is deleted, purged or expired

    @property
    def ttl_mode(self) -> TtlMode:
        first, last = self.ttl_first_use_seconds is not None, self.ttl_last_use_seconds is not None
        if first and last:
            return TtlMode.BOTH
        return TtlMode.FIRST_USE if first else TtlMode.LAST_USE if last else TtlMode.NONE

    def expires_at(self, stored_at: float, used_at: float, ttl: int | None = None) -> float:
        """When a column of this age is over; NEVER if it may stay. `ttl` is its own, and only shortens.

        A column of its own time to live is held to it from the moment that the policy counts from, and
        from its last use if the policy counts from none.
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
    """An org's policy, and those of single models, each of which stands for itself."""

    policy: Policy = Policy()
    models: dict[Name, Policy] = field(default_factory=dict)

    def of(self, model: str) -> Policy:
        return self.models.get(model, self.policy)


class Rules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one request asks for. It can be stricter than its org's policy, never laxer."""

    no_store: bool = False
    ttl_seconds: Seconds | None = None
    priority: Priority | None = None
    continue_id: Annotated[str, Meta(max_length=200)] = ""


AS_USUAL: Final = Rules()
