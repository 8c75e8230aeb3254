"""What would end an alert: in the case at hand, where that can be found out, and in general.

A rule names the remedies that may help (`Rule.fixes`). Each makes its change by the service that people
and automation call as well, so it is checked, recorded and taken back like any other.
"""

from __future__ import annotations

from django.db import transaction
from django.http import Http404
from django.urls import reverse

from console.accounts.principal import Principal
from console.alerts import services
from console.alerts.fixes import Fix
from console.alerts.models import Alert
from console.alerts.remedies import REMEDIES


def of(principal: Principal, alert: Alert) -> list[Fix]:
    """What is known of this case first, then what the rule says of all."""
    rule = alert.definition
    if rule is None:
        return []
    found = [REMEDIES[kind].find(principal, alert) for kind in rule.fixes if alert.is_open]
    return [
        *(fix for fix in found if fix),
        Fix(rule.remedy, page=reverse(rule.page) if rule.page else ""),
    ]


@transaction.atomic
def do(principal: Principal, alert: Alert, kind: str) -> str:
    """Begin what would end it, for who may do that, and say so in the timeline; where it is followed.

    Raises Http404 where there is no such fix (any more), and what the service raises that does it.
    """
    rule = alert.definition
    known = rule is not None and kind in rule.fixes and alert.is_open
    fix = REMEDIES[kind].find(principal, alert) if known else None
    if fix is None or not fix.kind:
        raise Http404("There is no such fix of this alert, or it would not help any more.")
    reason = f"alert {alert.pk}: {alert.title}"
    address = REMEDIES[kind].do(principal, alert, reason)
    services.comment(principal, services.for_change(principal, alert.pk), f"Done: {fix.text}")
    return address
