"""The rules as docs/alert-rules.md tells them."""

from __future__ import annotations

from console.alerts.catalogue import RULES
from console.alerts.rules import BREACH_SECONDS, FINE_SECONDS, Rule


def table() -> str:
    """In Markdown."""
    head = "| rule | severity | about | what it means | begins with | fires after, ends after |\n"
    return head + "|---|---|---|---|---|---|\n" + "".join(_row(rule) for rule in RULES)


def _row(rule: Rule) -> str:
    limits = ", ".join(f"`{limit.name}` {limit.default:g}" for limit in rule.own_limits)
    times = f"{rule.defaults[BREACH_SECONDS]:g} s, {rule.defaults[FINE_SECONDS]:g} s"
    means = f"[{rule.title}](runbooks/{rule.runbook}): {rule.means}"
    return f"| `{rule.slug}` | {rule.severity} | {rule.scope} | {means} | {limits} | {times} |\n"
