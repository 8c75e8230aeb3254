"""The table of rules in docs/alert-rules.md."""

from __future__ import annotations

from console.alerts.rules.catalogue import RULES
from console.alerts.rules.rule import KEEP_FIRING_SECONDS, PENDING_SECONDS, Rule
from telemetry.units import exact_duration


def table() -> str:
    """Markdown."""
    head = "| rule | severity | scope | description | default thresholds | pending, keep firing |\n"
    return head + "|---|---|---|---|---|---|\n" + "".join(_row(rule) for rule in RULES)


def _row(rule: Rule) -> str:
    thresholds = ", ".join(f"`{one.name}` {one.default:g}" for one in rule.own_thresholds)
    delays = ", ".join(
        exact_duration(round(rule.defaults[name])) for name in (PENDING_SECONDS, KEEP_FIRING_SECONDS)
    )
    text = f"[{rule.title}](runbooks/{rule.runbook}): {rule.description}"
    return f"| `{rule.slug}` | {rule.severity} | {rule.scope} | {text} | {thresholds} | {delays} |\n"
