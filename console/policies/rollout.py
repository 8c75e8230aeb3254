"""How far an org's policy has come. Drivers serve many orgs: not everybody may hear of each session."""

from __future__ import annotations

from dataclasses import replace

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.control.services import Reach, applied
from console.policies.services import ActivePolicy
from console.sessions.models import Job


def reach(principal: Principal, held: ActivePolicy) -> Reach:
    """Who has it, and who not. Drivers of others' sessions are counted, and named to the platform's own
    people only."""
    found = applied(held.version.change if held.version else None)
    if principal.on_platform(Role.VIEWER):
        return found
    own = own_drivers(held.org.slug)
    standings = [
        one if one.name in own else replace(one, name="", why_not="") for one in found.standings
    ]
    return replace(found, standings=standings)


def own_drivers(slug: str) -> frozenset[str]:
    """The names of those that an org's own sessions have."""
    return frozenset(Job.objects.filter(session__org__slug=slug).values_list("driver__name", flat=True))
