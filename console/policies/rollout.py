"""How far an org's policy has come. Drivers serve many orgs: not everybody may hear of each session."""

from __future__ import annotations

from dataclasses import dataclass, replace

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.control.services import Reach, applied
from console.orgs.models import Org
from console.policies.services import ActivePolicy
from console.sessions.driver_orgs import drivers_serving
from console.sessions.models import Job
from console.visibility import Sight


def reach(principal: Principal, held: ActivePolicy) -> Reach:
    """Who of the drivers that serve it has it, and who not. Drivers of others' sessions are counted, and
    named to the platform's own people only."""
    found = applied_on(held)
    if principal.on_platform(Role.VIEWER):
        return found
    own = own_drivers(held.org.slug)
    standings = [
        one if one.name in own else replace(one, name="", why_not="") for one in found.standings
    ]
    return replace(found, standings=standings)


def applied_on(held: ActivePolicy) -> Reach:
    """On the drivers that serve the org, whether they did when it was saved or not. For the platform.

    They have it once they have heard of the last change that it follows from: of the org's own policy,
    or of the default and the limits. Those whose job has ended serve nobody; they are told before they
    do.
    """
    serving = set(drivers_serving(held.org).values_list("name", flat=True))
    changes = [one.change for one in (held.version, held.cluster.version) if one and one.change]
    return applied(max(changes, key=lambda change: change.pk, default=None), among=serving)


@dataclass(frozen=True, slots=True)
class ServedBy:
    """The drivers that may serve an org: those that somebody may know of, and how many others."""

    named: list[str]
    others: int


def served_by(principal: Principal, org: Org) -> ServedBy:
    names = list(drivers_serving(org).order_by("name").values_list("name", flat=True))
    sight = Sight(principal)
    named = [name for name in names if sight.knows_driver(name)]
    return ServedBy(named, len(names) - len(named))


def own_drivers(slug: str) -> frozenset[str]:
    """The names of those that an org's own sessions have."""
    return frozenset(Job.objects.filter(session__org__slug=slug).values_list("driver__name", flat=True))
