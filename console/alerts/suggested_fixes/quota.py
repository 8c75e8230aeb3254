"""The action that raises an org's memory quota."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final

from django.http import Http404
from django.urls import reverse
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.models import Alert
from console.alerts.suggested_fixes.definition import Call, Change, SuggestedFix
from console.metrics.catalog import METRICS
from console.metrics.services import series
from console.orgs.models import Org
from console.policies import bulk
from console.policies.services import active_policy
from console.visibility import Sight
from telemetry.queries import TOPIC, TOPICS_MAX, Fold, Unanswerable
from telemetry.topics import kind_of
from telemetry.units import exact_size, size

log = logging.getLogger(__name__)

FULL_SHARE: Final = 0.9  # of a quota: below it the quota is not the problem
RAISE_BY: Final = 1.5
MEMORY: Final = "swdriver_org_bytes"


class RaiseQuota:
    """Raises the memory quota of an org by half, if a driver has filled it."""

    def suggest(self, principal: Principal, alert: Alert) -> SuggestedFix | None:
        org, found = alert.org, self._quota(alert.org) if alert.org else None
        if org is None or found is None:
            return None
        driver, held, quota, wanted = found
        where = driver if Sight(principal).knows_driver(driver) else "a driver"
        return SuggestedFix(
            f"Raise the memory quota of {org.name}: it uses {size(held)} on {where}.",
            "quota",
            "Raise it now",
            (Change("Memory quota per driver", exact_size(quota), exact_size(wanted)),),
            Call(
                "POST",
                "/policies/bulk",
                {"orgs": [org.slug], "changes": {"dram_bytes_max": wanted}, "reason": str(alert)},
                {"Idempotency-Key": "$(date +%s%N)"},
            ),
            self._refusal(principal, org, wanted),
        )

    def apply(self, principal: Principal, alert: Alert, reason: str) -> str:
        org, found = alert.org, self._quota(alert.org) if alert.org else None
        if org is None or found is None:
            raise Http404("The memory quota is not full any more.")
        bulk.save(principal, [org.slug], {"dram_bytes_max": found[3]}, reason=reason)
        return reverse("policy", args=[org.slug])

    @staticmethod
    def _quota(org: Org) -> tuple[str, int, int, int] | None:
        """The fullest driver, its bytes, the quota, and the raised quota; None unless it is full."""
        quota = active_policy(org).policy.dram_bytes_max
        fullest = _fullest_driver(org) if quota else None
        if not quota or fullest is None or fullest[1] < quota * FULL_SHARE:
            return None
        return *fullest, quota, int(quota * RAISE_BY)

    @staticmethod
    def _refusal(principal: Principal, org: Org, wanted: int) -> str:
        if principal.read_only or not principal.holds(Role.ORG_ADMIN, org.pk):
            return "This needs the role org admin."
        [planned] = bulk.plan(principal, [org.slug], {"dram_bytes_max": wanted})
        return " ".join(planned.refused)


def _fullest_driver(org: Org) -> tuple[str, int] | None:
    """The driver that stores most of an org, and its bytes, over the last minute; None if there are too
    many to ask about."""
    now = timezone.now()
    try:
        told = series(
            "driver:*",
            METRICS[MEMORY],
            Fold.MAX,
            now - timedelta(minutes=1),
            now,
            60,
            TOPICS_MAX,
            where={"org": org.slug},
            by=(TOPIC,),
        )
    except Unanswerable as error:
        log.warning("Which driver stores most of %s is not known: %s", org.slug, error)
        return None
    held = {one.labels[TOPIC]: max(one.numbers, default=0.0) for one in told}
    driver = max(held, key=lambda topic: held[topic], default="")
    return (driver.removeprefix(f"{kind_of(driver)}:"), int(held[driver])) if driver else None
