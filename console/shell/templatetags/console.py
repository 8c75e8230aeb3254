"""The few pieces that every page is made of. The living page /-/design shows them all."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from console.accounts.roles import Role
from telemetry import units

register = template.Library()
MEASURED = frozenset({"seconds", "share", "bytes"})  # units that `units.shown` knows


@register.simple_tag
def moment(at: datetime | None, never: str = "never") -> str | SafeString:
    """A point in time: in UTC from the server, and in the viewer's zone where scripts run."""
    if at is None:
        return never
    text = at.strftime("%Y-%m-%d %H:%M:%S UTC")
    return format_html('<time datetime="{}" data-moment>{}</time>', at.isoformat(), text)


@register.simple_tag
def age(at: datetime | None, never: str = "never", stale_seconds: int = 0) -> str | SafeString:
    """How long ago, which goes on counting in the browser and greys when it gets stale."""
    if at is None:
        return never
    return format_html(
        '<time datetime="{}" data-age data-stale="{}" title="{}">{}</time>',
        at.isoformat(),
        stale_seconds or "",
        at.strftime("%Y-%m-%d %H:%M:%S UTC"),
        units.age(round((timezone.now() - at).total_seconds())),
    )


@register.simple_tag
def status(kind: str, text: str) -> SafeString:
    """`ok`, `warn`, `bad` or `off`: told by shape, colour and text at once."""
    return format_html('<span class="status status--{}">{}</span>', kind, text)


@register.simple_tag
def bar(rate: float | None) -> SafeString:
    """A rate as a length, beside the number that says the same."""
    return format_html(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="bar-ground" width="100" height="8"/>'
        '<rect class="bar-fill" width="{}" height="8"/></svg>',
        round(100 * (rate or 0), 1),
    )


register.filter("byte_size", units.size)
register.filter("duration", units.duration)
register.filter("exact_duration", units.exact_duration)


@register.filter
def role_name(role: int | None) -> str:
    return Role(role).label if role else "none"


@register.filter
def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@register.filter
def in_diff(value: Any) -> str:
    """A value of a diff as people read it: text as it is, names one after the other, everything else as
    JSON."""
    if value is None:
        return "—"
    if value == "":
        return "(empty)"
    if value in ([], {}):
        return "none"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return value if isinstance(value, str) else as_json(value)


@register.filter
def figure(value: float | None) -> str:
    """A number as people read it: not more digits than tell something."""
    if value is None:
        return "—"
    if value and abs(value) < 0.001:
        return f"{value:.3g}"
    return f"{value:,.3f}".rstrip("0").rstrip(".")


@register.filter
def words(name: str) -> str:
    """`no_data` → `no data`."""
    return name.replace("_", " ")


@register.filter
def quantity(value: float | None, unit: str) -> str:
    """A number with its unit: `3.76 ms` of seconds, `95 %` of a share, `1,280 requests`; “—”."""
    if value is None:
        return figure(value)
    if unit in MEASURED:
        return units.shown(value, unit)
    return f"{figure(value)} {unit}".rstrip()


@register.filter
def fact_name(name: str) -> str:
    """`burn_rate` → `burn rate`, `latency_seconds` → `latency`: the value has the unit."""
    return words(name.removesuffix("_seconds"))


@register.filter
def evidence(value: Any, name: str = "") -> str:
    """A fact of an alert by its name: a number, a text, or several of them."""
    if isinstance(value, dict):
        return ", ".join(f"{words(str(key))} {evidence(one, name)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(evidence(one, name) for one in value) or "none"
    if isinstance(value, int | float):
        unit = name.rpartition("_")[2]
        return quantity(value, "bytes" if "bytes" in name else unit if unit in MEASURED else "")
    return str(value)
