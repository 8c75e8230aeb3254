"""A policy and its differences in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from console.policies.documents import changed_fields
from swdriver_shim.policy import Policy, Tiers, TtlMode
from telemetry.units import exact_duration, exact_size, size

Difference = tuple[str, str, str]  # what, before, after

LABELS: Final = {
    "ttl_first_use_seconds": "Expire after first store",
    "ttl_last_use_seconds": "Expire after last use",
    "tiers": "Storage tiers",
    "dram_bytes_max": "Memory limit",
    "tier2_bytes_max": "Tier 2 limit",
    "share": "Share of memory",
    "priority": "Priority",
    "displacement": "Displacement policy",
    "encrypt_tier2": "Encrypt tier 2",
    "scrub": "Scrub on delete",
    "store_tokens_max": "Stored tokens per prompt",
    "redundant_from_priority": "Redundant in tier 2 from priority",
}
TIERS: Final = {
    Tiers.NONE: "none: nothing is stored",
    Tiers.DRAM: "memory only",
    Tiers.TIER2: "memory and tier 2",
}


def sentence(policy: Policy) -> str:
    """What happens to a prompt, for people who have never seen the fields."""
    if policy.tiers is Tiers.NONE:
        return "Prompts are not stored: every prompt is recomputed."
    said = f"Prompts are stored {_where(policy)} {_how_long(policy)}."
    return " ".join([said, *_further(policy)])


def _where(policy: Policy) -> str:
    if policy.tiers is Tiers.DRAM:
        return "in memory only"
    return f"in memory and in {'encrypted ' if policy.encrypt_tier2 else ''}tier 2"


def _how_long(policy: Policy) -> str:
    first, last = policy.ttl_first_use_seconds, policy.ttl_last_use_seconds
    match policy.ttl_mode:
        case TtlMode.BOTH if first is not None and last is not None:
            longest = exact_duration(first)
            return f"for {exact_duration(last)} after their last use, and at most {longest} in total"
        case TtlMode.FIRST_USE if first is not None:
            return f"for {exact_duration(first)} after they were first stored, regardless of use"
        case TtlMode.LAST_USE if last is not None:
            return f"for {exact_duration(last)} after their last use"
    return "until space is needed"


def _further(policy: Policy) -> Iterator[str]:
    if policy.dram_bytes_max is not None:
        yield f"They use at most {size(policy.dram_bytes_max)} of memory per driver."
    if policy.tiers is Tiers.TIER2 and policy.tier2_bytes_max is not None:
        yield f"They use at most {size(policy.tier2_bytes_max)} of tier 2."
    is_in_tier2 = policy.tiers is Tiers.TIER2 and policy.tier2_bytes_max != 0
    if is_in_tier2 and policy.redundant_from_priority is not None:
        which = _redundant(policy.redundant_from_priority)
        yield f"{which} are stored redundantly in tier 2, where the rules of sessions have it."
    if policy.store_tokens_max is not None:
        yield f"Only the first {policy.store_tokens_max:,} tokens of each prompt are stored."
    if policy.scrub:
        yield "Deleted columns are overwritten."


def _redundant(priority: int) -> str:
    return f"Those of priority {priority} or more" if priority else "All of them"


def value(field: str, told: Any) -> str:
    """One field's value, as it stands in tables."""
    if field == "tiers":
        return TIERS[Tiers(told)]
    if isinstance(told, bool):
        return "yes" if told else "no"
    if told is None:
        return "never" if field.startswith("ttl") else "none" if "redundant" in field else "no limit"
    if field == "store_tokens_max":
        return f"the first {told:,}"
    if field.startswith("ttl"):
        return exact_duration(told)
    return size(told) if field.endswith("bytes_max") else str(told)


def differences(before: Policy, after: Policy) -> list[Difference]:
    """(label, before, after) of what differs; sizes that read alike are shown to the byte."""
    told = []
    for field in changed_fields(before, after):
        was, will = getattr(before, field), getattr(after, field)
        pair = value(field, was), value(field, will)
        told.append(
            (LABELS[field], *(pair if pair[0] != pair[1] else (exact_size(was), exact_size(will))))
        )
    return told
