"""A policy as one would say it, and its differences. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from console.policies.documents import changed_fields
from swdriver_shim.policy import Policy, Tiers, TtlMode

Difference = tuple[str, str, str]  # what, before, after

LABELS: Final = {
    "ttl_first_use_seconds": "Gone after it was stored",
    "ttl_last_use_seconds": "Gone after its last use",
    "tiers": "Where it may lie",
    "dram_bytes_max": "Memory at most",
    "tier2_bytes_max": "Tier 2 at most",
    "share": "Share of memory",
    "priority": "Priority",
    "eviction": "What goes first",
    "encrypt_tier2": "Encrypted in tier 2",
    "scrub": "Overwritten when it goes",
}
TIERS: Final = {
    Tiers.NONE: "nowhere: nothing is kept",
    Tiers.DRAM: "in memory only, never on disk",
    Tiers.TIER2: "in memory, and beyond it in tier 2",
}
_UNITS: Final = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
_SIZES: Final = (
    (1 << 50, "PiB"),
    (1 << 40, "TiB"),
    (1 << 30, "GiB"),
    (1 << 20, "MiB"),
    (1 << 10, "KiB"),
)


def span(seconds: int) -> str:
    """`10 minutes`, `an hour and 30 minutes`: exact, so that two different times never look alike."""
    parts = []
    for size, unit in _UNITS:
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {unit}{'s' if count > 1 else ''}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "0 seconds"


def size(count: int) -> str:
    """`64 GiB`, and with digits as needed: exact up to thousandths."""
    for unit, name in _SIZES:
        if abs(count) >= unit:
            return f"{count / unit:.3f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{count} bytes"


def sentence(policy: Policy) -> str:
    """What happens to a prompt, for people who have never seen the fields."""
    if policy.tiers is Tiers.NONE:
        return "Prompts are not kept at all: every one is computed anew."
    said = f"Prompts are kept {_where(policy)} {_how_long(policy)}."
    return " ".join([said, *_further(policy)])


def _where(policy: Policy) -> str:
    if policy.tiers is Tiers.DRAM:
        return "in memory only, never on disk,"
    return f"in memory and in {'encrypted ' if policy.encrypt_tier2 else ''}tier 2"


def _how_long(policy: Policy) -> str:
    first, last = policy.ttl_first_use_seconds, policy.ttl_last_use_seconds
    match policy.ttl_mode:
        case TtlMode.BOTH if first is not None and last is not None:
            return f"for {span(last)} after their last use, and at most {span(first)} in all"
        case TtlMode.FIRST_USE if first is not None:
            return f"for {span(first)} after they were first stored, however often they are used"
        case TtlMode.LAST_USE if last is not None:
            return f"for {span(last)} after their last use"
    return "for as long as there is room"


def _further(policy: Policy) -> Iterator[str]:
    if policy.dram_bytes_max is not None:
        yield f"They take at most {size(policy.dram_bytes_max)} of memory on each driver."
    if policy.tiers is Tiers.TIER2 and policy.tier2_bytes_max is not None:
        yield f"They take at most {size(policy.tier2_bytes_max)} of tier 2."
    if policy.scrub:
        yield "What goes is overwritten."


def value(field: str, told: Any) -> str:
    """One field's value, as it stands in tables."""
    if field == "tiers":
        return TIERS[Tiers(told)]
    if isinstance(told, bool):
        return "yes" if told else "no"
    if told is None:
        return "as long as there is room" if field.startswith("ttl") else "no limit"
    if field.startswith("ttl"):
        return span(told)
    return size(told) if field.endswith("bytes_max") else str(told)


def differences(before: Policy, after: Policy) -> list[Difference]:
    """(label, before, after) of what differs; what reads alike is shown as the plain number."""
    told = []
    for field in changed_fields(before, after):
        was, will = getattr(before, field), getattr(after, field)
        pair = value(field, was), value(field, will)
        told.append((LABELS[field], *(pair if pair[0] != pair[1] else (str(was), str(will)))))
    return told
