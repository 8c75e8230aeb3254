"""All alert rules. docs/alert-rules.md is generated from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from console.alerts.rules import drivers, network, nodes, security, telemetry
from console.alerts.rules.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    *nodes.RULES,
    *drivers.RULES,
    *network.RULES,
    *telemetry.RULES,
    *security.RULES,
)
BY_SLUG: Final[Mapping[str, Rule]] = {rule.slug: rule for rule in RULES}
