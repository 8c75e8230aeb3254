"""Rates and sizes, as pages about policies show them."""

from __future__ import annotations

from django import template

from console.policies import sentences
from swdriver_shim.policy import Policy
from telemetry.units import size

register = template.Library()


@register.simple_tag
def percent(rate: float | None) -> str:
    """Without traffic there is no rate, and that is not 0 %."""
    return "no traffic" if rate is None else f"{100 * rate:.1f} %"


@register.simple_tag
def points(part: float) -> str:
    return f"{100 * part:.1f} points"


@register.simple_tag
def size_of(count: float) -> str:
    """Without its sign, which the words beside it tell."""
    return size(abs(count))


@register.simple_tag
def sentence_of(policy: Policy) -> str:
    return sentences.sentence(policy)
