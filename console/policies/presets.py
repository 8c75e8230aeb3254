"""Predefined policies to start from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from swdriver_shim.policy import Policy, Tiers


@dataclass(frozen=True, slots=True)
class Preset:
    name: str
    description: str
    policy: Policy


PRESETS: Final = {
    template.name.lower(): template
    for template in (
        Preset(
            "Strict",
            "Expires 10 minutes after last use and is overwritten. Memory only.",
            Policy(ttl_last_use_seconds=600, ttl_first_use_seconds=7200, scrub=True),
        ),
        Preset(
            "Balanced",
            "Expires an hour after last use, after a day at most. Memory only.",
            Policy(ttl_last_use_seconds=3600, ttl_first_use_seconds=86_400),
        ),
        Preset(
            "Long-lived",
            "Expires a week after last use. Memory and encrypted tier 2.",
            Policy(ttl_last_use_seconds=7 * 86_400, tiers=Tiers.TIER2, encrypt_tier2=True),
        ),
        Preset(
            "Not stored",
            "Nothing is stored: every prompt is recomputed.",
            Policy(tiers=Tiers.NONE),
        ),
    )
}
