"""Explanations of drivers in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from console.explain.services import Question, RequestResult
from console.policies.templatetags.policies import percent
from console.shell.templatetags.console import status
from telemetry import units

register = template.Library()

SHOWN: Final = 4  # tokens or keys in the example call
TIERS: Final = {
    "dram": "hit in memory",
    "sibling": "hit in a sibling's memory",
    "tier2": "hit in tier 2",
}
# What each reason means for the person who can change it.
REASONS: Final = {
    "never_stored": "never stored, or displaced too long ago to be remembered",
    "writing": "being stored at that moment",
    "expired": "expired by the org's policy",
    "displaced": "their room was needed",
    "quota": "the org's quota was used up",
    "purged": "the org was purged",
    "deleted": "deleted by a caller",
    "other_namespace": "stored for another model, revision, dtype, layout, shape or adapter",
    "no_state": "stored, but without a state of the model's state layers to continue from",
    "no_store": "not stored, by the policy or the request",
    "prefix_only": "behind the part of a prompt that the policy or the request stores",
    "tier2_late": "in tier 2, and not recalled in time",
    "not_borrowed": "in a sibling's memory, and not borrowed in time",
    "not_worth_it": "computing was faster than fetching from tier 2",
    "agent_lost": "a node with a part of them was lost",
    "seal_refused": "the seal did not match: wrong or damaged bytes in the slot",
}
# Why columns in memory are not copied to tier 2, to be read behind "memory". The policy's own reason is
# on its page.
NO_SPILL: Final = {
    "policy": "",
    "request": "only, by the request",
    "not_encrypted": "only: the request needs encryption, and tier 2 is not encrypted",
    "no_data_key": "only: tier 2 is encrypted, and the org has no data key",
    "own_ttl": "only: they have a TTL of their own",
    "tail": "only: less than a whole column",
}


@register.simple_tag
def hit_sentence(result: RequestResult) -> str:
    hit, asked = result.hit_tokens, result.asked_tokens
    if not hit:
        return f"0 of {asked:,} tokens hit."
    return f"{hit:,} of {asked:,} tokens hit ({percent(hit / asked)})."


@register.simple_tag
def hit_part(result: RequestResult) -> str:
    return str(percent(result.hit_tokens / result.asked_tokens if result.asked_tokens else None))


@register.simple_tag
def body_of(question: Question | None, session: str) -> str:
    """The body of the same question over REST; the first of many tokens or keys."""
    asked: dict[str, Any] = {"request": "…"}
    if question:
        given = {
            "request": question.request,
            "tokens": _some(question.tokens),
            "keys": _some(question.keys),
            "adapter": question.adapter,
        }
        asked = {name: value for name, value in given.items() if value}
    if session:
        asked["session"] = session
    return json.dumps(asked, ensure_ascii=False)


def _some(pasted: Sequence[object]) -> list[object]:
    return [*pasted[:SHOWN], *(["…"] if len(pasted) > SHOWN else [])]


@register.simple_tag
def outcome_status(outcome: str) -> SafeString:
    if outcome in TIERS:
        return status("ok", TIERS[outcome])
    return status("warn", f"missed: {outcome.replace('_', ' ')}")


@register.simple_tag
def outcome_words(outcome: str) -> SafeString | str:
    """The reason of a miss in words; empty for a hit."""
    if outcome not in REASONS:
        return ""
    return format_html('<span class="quiet">{}</span>', REASONS[outcome])


@register.simple_tag
def no_spill_words(reason: str | None) -> SafeString | str:
    """Why columns are not copied to tier 2, in words; empty if they may be."""
    words = NO_SPILL.get(reason or "", "")
    return format_html(' <span class="quiet">{}</span>', words) if words else ""


register.simple_tag(units.age, name="ago")


@register.simple_tag
def expiry(each: tuple[float, float]) -> str:
    """The earliest and the latest expiry."""
    soonest, latest = (units.duration(max(0, round(seconds))) for seconds in each)
    return f"in {soonest}" if soonest == latest else f"in {soonest} to {latest}"
