"""How far what brains are told has come."""

from __future__ import annotations

from console.control.models import Kind
from console.control.services import Reach, applied
from console.orgs.models import Org
from console.routing.models import OrgLimits


def reach_of_limits(org: Org) -> Reach:
    """Which brains have the limits of an org. An org is told how many, and not which."""
    row = OrgLimits.objects.select_related("change").filter(org=org).first()
    return applied(row.change if row else None, Kind.BRAIN)
