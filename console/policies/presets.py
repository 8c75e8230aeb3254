"""Policies to start from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from swdriver_shim.policy import Policy, Tiers


@dataclass(frozen=True, slots=True)
class Template:
    name: str
    what_for: str
    policy: Policy


TEMPLATES: Final = {
    template.name.lower(): template
    for template in (
        Template(
            "Strict",
            "Ten minutes after its last use a prompt is gone, and overwritten; never on disk.",
            Policy(ttl_last_use_seconds=600, ttl_first_use_seconds=7200, scrub=True),
        ),
        Template(
            "Balanced",
            "An hour after its last use; a day in all. In memory only.",
            Policy(ttl_last_use_seconds=3600, ttl_first_use_seconds=86_400),
        ),
        Template(
            "Long-lived",
            "For a week after its last use, on disk too, encrypted with the org's own key.",
            Policy(ttl_last_use_seconds=7 * 86_400, tiers=Tiers.TIER2, encrypt_tier2=True),
        ),
        Template(
            "Not stored",
            "Nothing is kept at all: every prompt is computed anew.",
            Policy(tiers=Tiers.NONE),
        ),
    )
}
