"""Sessions: who may see and change them, and how large they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from django.db.models import Count, Prefetch, QuerySet
from django.http import Http404

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.fleet.nodes import tells_streams
from console.orgs.models import Org
from console.orgs.services import get_org
from console.sessions.models import Job, Session, SessionBox, Shard
from console.sessions.world import hold


@dataclass(frozen=True, slots=True)
class Sizes:
    """In boxes. `held` is what quotas and shares go by."""

    desired: int
    granted: int
    actual: int

    @property
    def held(self) -> int:
        return max(self.desired, self.granted, self.actual)


def sizes(session: Session) -> Sizes:
    """From boxes that were fetched with it, where they were."""
    boxes = session.boxes.all()
    return Sizes(session.boxes_desired, len(boxes), sum(box.ready for box in boxes))


def visible_sessions(principal: Principal) -> QuerySet[Session]:
    """Those of the orgs that they may see, for people of the platform all; with org and boxes."""
    boxes = Prefetch("boxes", SessionBox.objects.select_related("box"))
    found = Session.objects.select_related("org").prefetch_related(boxes)
    found = found.annotate(job_count=Count("jobs"))
    if principal.on_platform(Role.VIEWER):
        return found
    confined = principal.token.org_id if principal.token else None
    if confined is not None:
        return found.filter(org=confined) if principal.role_in(confined) else found.none()
    return found.filter(org__in=principal.orgs_where(Role.VIEWER))


def role_on(principal: Principal, session: Session) -> Role | None:
    return principal.platform_role if session.org_id is None else principal.role_in(session.org_id)


def get_session(principal: Principal, name: str, at_least: Role = Role.VIEWER) -> Session:
    """The one access function: a stranger gets Http404, who may not do it gets Refused."""
    session = visible_sessions(principal).filter(name=name).first()
    role = role_on(principal, session) if session else None
    if session is None or role is None:
        raise Http404("There is no such session, or it is not yours to see.")
    if role < at_least:
        raise Refused(f"This needs the role {at_least.label} on {session.name}; yours is {role.label}.")
    return session


def for_change(principal: Principal, name: str, at_least: Role = Role.ORG_ADMIN) -> Session:
    """The session, locked, while nobody else plans or reserves, for somebody who may change it."""
    principal.check_may_change()
    session = get_session(principal, name, at_least)
    hold()
    locked = Session.objects.select_for_update(of=("self",)).select_related("org")
    found = locked.filter(pk=session.pk).first()
    if found is None:
        raise Http404("There is no such session any more.")
    return found


def check_may_create(principal: Principal, org: Org | None) -> None:
    principal.check_may_change()
    if org is None:
        principal.check_platform(Role.PLATFORM_ADMIN)
    else:
        get_org(principal, org.slug, Role.ORG_ADMIN)


def get_job(session: Session, name: str) -> Job:
    job = session.jobs.select_related("driver").filter(name=name).first()
    if job is None:
        raise Http404(f"{session.name} has no job {name}.")
    return job


def shards_of(session: Session) -> QuerySet[Shard]:
    related = ("job__driver", "job__session", "box", "node", "next_node", "operation")
    found = Shard.objects.filter(job__session=session).select_related(*related)
    return found.order_by("job__name", "group", "index")


@tells_streams
def streams_on(nodes: Collection[str]) -> dict[str, int]:
    """How many shards each of these nodes has, or is about to have."""
    found: Counter[str] = Counter()
    for field in ("node__name", "next_node__name"):
        found.update(Shard.objects.filter(**{f"{field}__in": nodes}).values_list(field, flat=True))
    return dict(found)
