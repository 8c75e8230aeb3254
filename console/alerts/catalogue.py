"""The rules that there are. docs/alert-rules.md has the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from console.alerts import (
    catalogue_numbers,
    catalogue_paths,
    catalogue_service,
    catalogue_store,
    catalogue_trust,
)
from console.alerts.rules import Rule

RULES: Final[tuple[Rule, ...]] = (
    *catalogue_store.RULES,
    *catalogue_service.RULES,
    *catalogue_paths.RULES,
    *catalogue_numbers.RULES,
    *catalogue_trust.RULES,
)
BY_SLUG: Final[Mapping[str, Rule]] = {rule.slug: rule for rule in RULES}
