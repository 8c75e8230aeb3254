"""What drivers tell of a prompt, in words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any, Final

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from console.explain.services import Question, Then
from console.policies.templatetags.policies import percent
from console.shell.templatetags.console import status
from telemetry import units

register = template.Library()

SHOWN: Final = 4  # of what was pasted, in the call that does the same
TIERS: Final = {"dram": "hit in memory", "tier2": "hit in tier 2"}
# What each reason means to somebody who can do something about it.
REASONS: Final = {
    "never_stored": "they were never stored, or so long ago that nobody remembers",
    "writing": "they were on their way out at that moment",
    "expired": "the org's policy let them expire",
    "displaced": "their room was needed",
    "quota": "the org had as much as its policy lets it",
    "purged": "the org was purged",
    "deleted": "somebody deleted them",
    "other_namespace": "they are stored for another model, revision, type, layout or adapter",
    "no_store": "the policy or the request did not want them stored",
    "tier2_late": "they were in tier 2, and not back in time",
    "not_worth_it": "computing them was faster than fetching them",
    "agent_lost": "a node that had part of them was lost",
    "seal_refused": "what lay in their slots was not them, or not whole",
}


@register.simple_tag
def hit_sentence(then: Then) -> str:
    hit, asked = then.hit_tokens, then.asked_tokens
    if not hit:
        return f"Nothing of its {asked:,} tokens was there."
    return f"{hit:,} of its {asked:,} tokens were there, {percent(hit / asked)}."


@register.simple_tag
def hit_part(then: Then) -> str:
    return str(percent(then.hit_tokens / then.asked_tokens if then.asked_tokens else None))


@register.simple_tag
def body_of(question: Question | None, session: str) -> str:
    """What is sent to ask the same over REST, as a shell takes it. Of many tokens or keys the first."""
    asked: dict[str, Any] = {"request": "…"}
    if question:
        told = {
            "request": question.request,
            "tokens": _some(question.tokens),
            "keys": _some(question.keys),
            "adapter": question.adapter,
        }
        asked = {name: value for name, value in told.items() if value}
    if session:
        asked["session"] = session
    return shlex.quote(json.dumps(asked, ensure_ascii=False))


def _some(pasted: Sequence[object]) -> list[object]:
    return [*pasted[:SHOWN], *(["…"] if len(pasted) > SHOWN else [])]


@register.simple_tag
def outcome_status(outcome: str) -> SafeString:
    if outcome in TIERS:
        return status("ok", TIERS[outcome])
    return status("warn", f"missed: {outcome.replace('_', ' ')}")


@register.simple_tag
def outcome_words(outcome: str) -> SafeString | str:
    """Why; nothing of a hit, which says it all."""
    if outcome not in REASONS:
        return ""
    return format_html('<span class="quiet">{}</span>', REASONS[outcome])


register.simple_tag(units.age, name="ago")


@register.simple_tag
def expiry(each: tuple[float, float]) -> str:
    """The soonest and the latest."""
    soonest, latest = (units.duration(max(0, round(seconds))) for seconds in each)
    return f"in {soonest}" if soonest == latest else f"in {soonest} to {latest}"
