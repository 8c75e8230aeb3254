"""What somebody may know of. The one rule; whatever shows, finds, refuses or explains goes by it.

| kind | who knows of it |
|---|---|
| org, its members, policy, callers, notes | its members, and who has a role on the platform |
| session, its jobs, streams and boxes | the same of its org; of one that orgs share: the platform |
| workload, its revisions, instances, logs | the same of its org; of one without org: the platform |
| driver, its model and its address | who knows of the session that its job runs in; else the platform |
| node, leaf, link to the spine | the platform; others of those that a stream of their sessions is on |
| operation, alert, silence, channel, event | the same of its org; of one without an org: the platform |
| audit entry | on-call and above in its org or on the platform, and who made the change |
| number, live topic | as the org or session that it is of; of all else: the platform |

A credential that is confined to an org knows of that org only. Who may not know of a thing learns
neither its name nor that it is there: answers about it are those about what is not there, and texts say
"nodes" or nothing. What such a thing does to somebody (a node is full, a driver does not answer)
is told without saying which. Texts that are stored for all are written for those who may see least.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

from django.db.models import Q

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.fleet.models import Driver
from console.operations.machines import names_places
from console.operations.models import Operation
from console.placement import sentences
from console.sessions.models import Session, Stream

ASKING: Final = "Drivers and agents are asked until all of them have confirmed."
NOT_EVERYWHERE: Final = "Not all drivers and agents have confirmed. The platform's people see which."


def sees_fleet(principal: Principal) -> bool:
    """Whether they know of everything: they have a role on the platform."""
    return principal.on_platform(Role.VIEWER)


def of_orgs(principal: Principal, at_least: Role = Role.VIEWER, *, field: str = "org") -> Q:
    """What is of an org in which they have this role; everything for who has it on the platform.

    `field` holds the org. What is of no org is for the platform.
    """
    orgs = principal.orgs_with(at_least)
    return Q() if orgs is None else Q(**{f"{field}__in": orgs})


def without_places(principal: Principal, operation: Operation) -> Operation:
    """The operation as this principal is shown it; not to be saved.

    Machines that ask the whole fleet say in their messages who has not answered.
    """
    if sees_fleet(principal) or not names_places(operation.kind):
        return operation
    if not operation.done:
        operation.message = ASKING
    if operation.error:
        operation.error = {**operation.error, "detail": NOT_EVERYWHERE}
        operation.message = ""
    return operation


class Sight:
    """What one principal knows of the fleet, read when it is first asked for. For one request."""

    def __init__(self, principal: Principal) -> None:
        self._principal = principal

    @cached_property
    def sees_fleet(self) -> bool:
        return sees_fleet(self._principal)

    @cached_property
    def _drivers(self) -> dict[str, str]:
        """The drivers of their sessions, with the model that each serves."""
        theirs = Session.objects.filter(of_orgs(self._principal))
        found = Driver.objects.filter(job__session__in=theirs)
        return {driver.name: driver.model_name for driver in found}

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes that streams of their sessions are on, or are on their way to."""
        theirs = Session.objects.filter(of_orgs(self._principal))
        found = Stream.objects.filter(job__session__in=theirs)
        now = found.values_list("node__name", flat=True)
        coming = found.filter(next_node__isnull=False).values_list("next_node__name", flat=True)
        return frozenset(filter(None, (*now, *coming)))

    def knows_driver(self, name: str) -> bool:
        return self.sees_fleet or name in self._drivers

    def knows_model(self, name: str) -> bool:
        return self.sees_fleet or name in self._drivers.values()

    def why(self, why: str) -> str:
        """Why a stream is not on a better path, without nodes that they don't know of."""
        return why if self.sees_fleet else sentences.unnamed(why)
