"""Sessions: who may see and change them, and how large they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import (
    Aggregate,
    BigIntegerField,
    Count,
    Exists,
    F,
    OuterRef,
    Prefetch,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
)
from django.db.models.functions import Coalesce, Concat
from django.http import Http404

from console.accounts.principal import SYSTEM, Principal
from console.accounts.roles import Role
from console.fleet.models import Driver, Node
from console.fleet.nodes import Kind, tells_streams
from console.fleet.services import lock_fleet
from console.operations.models import PART, Operation
from console.orgs.models import Org
from console.orgs.services import get_org
from console.placement.topology import State, Tier
from console.search.services import Found, finder, nearest
from console.sessions.models import DriverOrg, Job, JobBox, Loss, Session, SessionBox, Stream
from console.sessions.plans import proposals
from console.sessions.plans.snapshot import Snapshot
from console.visibility import Sight, of_orgs, sees_fleet
from telemetry.topics import of_session
from telemetry.units import counted


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
    losses = Prefetch("losses", Loss.objects.select_related("node", "operation").order_by("node__name"))
    found = Session.objects.select_related("org").prefetch_related(boxes, losses)
    topic = Concat(Value(of_session("")), OuterRef("name"))
    running = Operation.objects.filter(target=topic, done=False).values("pk")
    of_parts = Operation.objects.filter(target__startswith=Concat(topic, Value(PART)), done=False)
    found = found.annotate(
        job_count=Count("jobs"),
        memory_bytes=_of_streams(Sum(F("slots") * F("slot_bytes"))),
        spine_count=_of_streams(Count("pk", filter=Q(tier=Tier.SPINE))),
        operation_id=Subquery(running),
        codes=ArraySubquery(
            Stream.objects.filter(job__session=OuterRef("pk"), job__running=True)
            .order_by("code")
            .values("code")
            .distinct()
        ),
        part_operation_ids=ArraySubquery(of_parts.order_by("pk").values("pk")),
    )
    return found.filter(of_orgs(principal))


def _of_streams(aggregate: Aggregate) -> Coalesce:
    """Of all streams of each session; nothing is 0."""
    streams = Stream.objects.filter(job__session=OuterRef("pk")).order_by().values("job__session")
    found = streams.annotate(found=aggregate).values("found")
    return Coalesce(Subquery(found, output_field=BigIntegerField()), 0)


def filtered(
    sessions: QuerySet[Session], *, org: str = "", waiting: bool | None = None
) -> QuerySet[Session]:
    """The same for the page and the API."""
    if org:
        sessions = sessions.filter(org__slug=org)
    return sessions if waiting is None else sessions.filter(waiting_since__isnull=not waiting)


def get_session(principal: Principal, name: str, at_least: Role = Role.VIEWER) -> Session:
    """The one access function: a stranger gets Http404, who may not do it gets Refused."""
    session = visible_sessions(principal).filter(name=name).first()
    return principal.checked(session, at_least, "session")


def for_change(principal: Principal, name: str, at_least: Role = Role.ORG_ADMIN) -> Session:
    """The session, locked, while nobody else plans or reserves, for somebody who may change it."""
    principal.check_may_change()
    session = get_session(principal, name, at_least)
    lock_fleet()
    locked = Session.objects.select_for_update(no_key=True, of=("self",)).select_related("org")
    found = locked.filter(pk=session.pk).first()
    if found is None:
        raise Http404("There is no such session any more.")
    return found


def orgs_said(session: Session) -> Literal["all"] | Sequence[str] | None:
    """The orgs that its workload is for by now; None where it belongs to none."""
    found = workload_of(session)
    return found.orgs_said if found else None


def workload_of(session: Session) -> Any:
    """The workload that it belongs to; None if it is people's."""
    return getattr(session, "workload", None)  # the other end is the workload's: sessions know none


def check_may_create(principal: Principal, org: Org | None) -> None:
    principal.check_may_change()
    if org is None:
        principal.check_platform(Role.PLATFORM_ADMIN)
    else:
        get_org(principal, org.slug, Role.ORG_ADMIN)


def usable_drivers(principal: Principal) -> QuerySet[Driver]:
    """The drivers that a job may be registered with: those that have joined, and have no job.

    Those of workloads are for their workloads' sessions, whose jobs are the orchestrator's to start. For
    who does not see the fleet, one that runs a job of a session that they may not know of, or has no job
    and is set aside for an org that they are not admin of, is as one that there is not.
    """
    drivers = Driver.objects.filter(joined_at__isnull=False).order_by("name")
    if principal == SYSTEM:
        return drivers
    drivers = drivers.filter(workload="")
    if sees_fleet(principal):
        return drivers
    theirs = Session.objects.filter(of_orgs(principal))
    rows = DriverOrg.objects.filter(driver=OuterRef("pk"), is_leaving=False, org__isnull=False)
    of_others = rows.exclude(of_orgs(principal, Role.ORG_ADMIN))
    return drivers.filter(Q(job=None) & ~Exists(of_others) | Q(job__session__in=theirs))


def get_driver(principal: Principal, name: str) -> Driver:
    """Raises Http404."""
    driver = usable_drivers(principal).filter(name=name).first()
    if driver is None:
        raise Http404(f"No driver “{name}” has joined that could take a job.")
    return driver


def reachable_nodes(principal: Principal, session: Session) -> QuerySet[Node]:
    """The nodes that they may name as the next place of a stream of this session.

    For who does not see the fleet: those that their streams are on, and those to which a plan would move
    streams of this session off the spine, which it tells them.
    """
    if sees_fleet(principal):
        return Node.objects.all()
    targets = {move.target for move in proposals.plan_rails(Snapshot.now(), session.name).moves}
    return Node.objects.filter(Q(name__in=targets) | Q(name__in=Sight(principal).nodes))


def get_node(principal: Principal, session: Session, name: str) -> Node:
    """Raises Http404."""
    node = reachable_nodes(principal, session).filter(name=name).first()
    if node is None:
        raise Http404(f"There is no node “{name}” that you may move streams to.")
    return node


def get_job(session: Session, name: str) -> Job:
    job = session.jobs.select_related("driver").filter(name=name).first()
    if job is None:
        raise Http404(f"{session.name} has no job {name}.")
    return job


def jobs_of(session: Session) -> QuerySet[Job]:
    boxes = Prefetch("boxes", JobBox.objects.select_related("session_box__box"))
    return session.jobs.select_related("driver").prefetch_related(boxes).order_by("name")


Mover = Callable[[Job], str]
_movers: list[Mover] = []


def moves_jobs(function: Mover) -> Mover:
    """Register who moves jobs by itself to other boxes: what it says of a job in a sentence, or nothing
    where the job is none of its own."""
    _movers.append(function)
    return function


def who_moves(job: Job) -> str:
    """Who has to take a job off a box that is drained, in a sentence."""
    said = next(filter(None, (move(job) for move in _movers)), "")
    return said or f"Job {job.name} of session {job.session.name} runs there: end it."


def jobs_on(held: SessionBox) -> list[Job]:
    found = Job.objects.filter(boxes__session_box=held).select_related("session", "driver")
    return list(found.order_by("name"))


def boxes_to_leave(session: Session) -> dict[str, list[str]]:
    """The names of the jobs on each box of it that is being drained. Who moves jobs ends them and starts
    them on other boxes. The drain gives the session another box once no job runs there."""
    draining = session.boxes.filter(box__state=State.DRAINING.value).select_related("box")
    return {held.box.name: [job.name for job in jobs_on(held)] for held in draining}


def get_stream(session: Session, name: str) -> Stream:
    found = next((stream for stream in streams_of(session) if stream.name == name), None)
    if found is None:
        raise Http404(f"{session.name} has no stream {name}.")
    return found


def streams_of(session: Session) -> QuerySet[Stream]:
    related = ("job__driver", "job__session", "box", "node", "next_node", "operation")
    found = Stream.objects.filter(job__session=session).select_related(*related)
    return found.order_by("job__name", "group", "index")


@tells_streams
def streams_on(kind: Kind, names: Collection[str]) -> dict[str, int]:
    """How many streams begin at each of these boxes; or end on these nodes, or are about to."""
    fields = ("box__name",) if kind == "box" else ("node__name", "next_node__name")
    found: Counter[str] = Counter()
    for field in fields:
        found.update(Stream.objects.filter(**{f"{field}__in": names}).values_list(field, flat=True))
    return dict(found)


@finder("sessions")
def find_sessions(principal: Principal, text: str, most: int) -> list[Found]:
    found = nearest(visible_sessions(principal).prefetch_related(None), text, "name")[:most]
    return [
        Found(
            one.name,
            f"{one.org.slug if one.org else 'of the platform'}, {counted(one.boxes_desired, 'box')}",
            "session",
            one.name,
        )
        for one in found
    ]
