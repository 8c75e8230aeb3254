"""All alert rules, and the table of them in docs/alert-rules.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from console.alerts.rules import brains, drivers, network, nodes, security, telemetry, workloads
from console.alerts.rules.rule import KEEP_FIRING_SECONDS, PENDING_SECONDS, Rule
from telemetry.units import exact_duration

RULES: Final[tuple[Rule, ...]] = (
    *nodes.RULES,
    *drivers.RULES,
    *brains.RULES,
    *workloads.RULES,
    *network.RULES,
    *telemetry.RULES,
    *security.RULES,
)
BY_SLUG: Final[Mapping[str, Rule]] = {rule.slug: rule for rule in RULES}


def table() -> str:
    """All rules, as docs/alert-rules.md has them."""
    head = "| rule | severity | scope | description | default thresholds | pending, keep firing |\n"
    return head + "|---|---|---|---|---|---|\n" + "".join(_row(rule) for rule in RULES)


def _row(rule: Rule) -> str:
    thresholds = ", ".join(f"`{one.name}` {one.default:g}" for one in rule.own_thresholds)
    delays = ", ".join(
        exact_duration(round(rule.defaults[name])) for name in (PENDING_SECONDS, KEEP_FIRING_SECONDS)
    )
    text = f"[{rule.title}](runbooks/{rule.runbook}): {rule.description}"
    return f"| `{rule.slug}` | {rule.severity} | {rule.scope} | {text} | {thresholds} | {delays} |\n"
