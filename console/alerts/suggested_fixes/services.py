"""Suggested fixes of an alert: those for the case at hand first, then the general one of its rule.

A rule names its actions (`Rule.actions`). Each makes its change through the same service as pages and
API, so it is checked, audited and undone in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from django.db import transaction
from django.http import Http404
from django.urls import reverse

from console.accounts.principal import Principal
from console.alerts import services
from console.alerts.models import Alert
from console.alerts.suggested_fixes.definition import Action, SuggestedFix
from console.alerts.suggested_fixes.nodes import Cordon, Drain
from console.alerts.suggested_fixes.quota import RaiseQuota
from console.alerts.suggested_fixes.streams import MoveStream, RestoreRails

ACTIONS: Final[Mapping[str, Action]] = {
    "move": MoveStream(),
    "restore-rails": RestoreRails(),
    "cordon": Cordon(),
    "drain": Drain(),
    "quota": RaiseQuota(),
}


def suggest(principal: Principal, alert: Alert) -> list[SuggestedFix]:
    rule = alert.definition
    if rule is None:
        return []
    found = [ACTIONS[name].suggest(principal, alert) for name in rule.actions if alert.is_open]
    general = SuggestedFix(rule.suggested_fix, page=reverse(rule.page) if rule.page else "")
    return [*(fix for fix in found if fix), general]


@transaction.atomic
def apply(principal: Principal, alert: Alert, name: str) -> str:
    """Apply an action and comment on the alert. Returns the page that shows the result.

    Raises Http404 if the action does not apply (any more), and whatever its service raises.
    """
    rule = alert.definition
    known = rule is not None and name in rule.actions and alert.is_open
    fix = ACTIONS[name].suggest(principal, alert) if known else None
    if fix is None or not fix.action:
        raise Http404("This alert has no such suggested fix, or it would not help any more.")
    reason = f"alert {alert.pk}: {alert.title}"
    address = ACTIONS[name].apply(principal, alert, reason)
    services.comment(principal, alert.pk, f"Applied: {fix.text}")
    return address
