"""Sessions over REST."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpResponse
from django.utils import timezone
from ninja import Path, Query

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import etag, matched, tagged
from console.api.fields import IfMatch
from console.api.idempotency import Answer, ValidateOnly, idempotent, with_dry_run
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers, documented
from console.api.shown import read
from console.operations.api import OperationOut, accepted
from console.orgs.models import SLUG
from console.orgs.services import get_org
from console.sessions import services
from console.sessions.changes import jobs, moves, sizes
from console.sessions.memory import memory_of
from console.sessions.models import Session
from console.sessions.plans.proposals import Proposal
from console.sessions.rest.schemas import (
    JobIn,
    JobOut,
    MemoryOut,
    MoveIn,
    PlanOut,
    ResizeIn,
    RestoreRailsIn,
    RestoreRailsOut,
    SessionIn,
    SessionOut,
    StreamOut,
)

router = Router(tags=["sessions"])

Name = Annotated[str, Path(pattern=SLUG, max_length=48, description="The session.")]
JobName = Annotated[str, Path(pattern=SLUG, max_length=48)]
PLANNED: dict[Any, Any] = {200: PlanOut, 202: OperationOut, **documented(404, 409, 412, 428)}


@listing(router, "/sessions", SessionOut, by="name")
def list_sessions(
    request: SignedInRequest,
    org: Annotated[str, Query(max_length=48, pattern=r"^[a-z0-9-]*$")] = "",
    waiting: Annotated[bool | None, Query(description="Only sessions that are waiting, or not.")] = None,
) -> Rows:
    """List sessions."""
    found = services.visible_sessions(request.principal)
    return services.filtered(found, org=org, waiting=waiting)


@router.post("/sessions", response={200: PlanOut, 202: OperationOut, **documented(404, 409, 412)})
@with_dry_run
def create_session(
    request: SignedInRequest, payload: SessionIn, validate_only: ValidateOnly = False
) -> Answer:
    """Create a session."""
    org = get_org(request.principal, payload.org) if payload.org else None
    services.check_may_create(request.principal, org)
    session = sizes.new_session(
        payload.name,
        org,
        payload.boxes,
        path=payload.path or "",
        bytes_per_token=payload.bytes_per_token,
    )
    if validate_only:
        return _planned(request, session, sizes.plan_size(session, payload.boxes))
    operation = sizes.create(request.principal, session, **payload.asked())
    return accepted(operation, _needs(session))


@router.get("/sessions/{name}", response=answers(SessionOut, 404))
def get_session(request: SignedInRequest, response: HttpResponse, name: Name) -> Session:
    """Get a session."""
    return tagged(response, services.get_session(request.principal, name))


@router.post("/sessions/{name}/resize", response=PLANNED)
@with_dry_run
def resize_session(
    request: SignedInRequest,
    name: Name,
    payload: ResizeIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Resize a session. That of a workload follows it: only its present size is taken, which divides
    memory anew."""
    session = matched(services.for_change(request.principal, name), if_match)
    if validate_only:
        return _planned(request, session, sizes.plan_resize(session, payload.boxes))
    sizes.check_by_hand(session, payload.boxes)
    operation = sizes.resize(request.principal, session, payload.boxes, **payload.asked())
    return accepted(operation, _needs(session), ETag=etag(session.version))


@router.delete("/sessions/{name}", response=answers(OperationOut, 404, 409, 412, 428, status=202))
@idempotent
def delete_session(
    request: SignedInRequest,
    name: Name,
    if_match: IfMatch,
    end_jobs: Annotated[bool, Query(description="Also end its jobs.")] = False,
) -> Answer:
    """Delete a session."""
    session = matched(services.for_change(request.principal, name), if_match)
    return accepted(sizes.delete(request.principal, session, end_jobs=end_jobs), _needs(session))


def _planned(request: SignedInRequest, session: Session, plan: Proposal) -> Answer:
    return Answer(200, [_needs(session)], read(PlanOut, plan, request))


def _needs(session: Session, role: Role = Role.ORG_ADMIN) -> Authority:
    return Authority(session.org_id, role)


# Jobs and streams


@listing(router, "/sessions/{name}/jobs", JobOut, 404, by="pk")
def list_jobs(request: SignedInRequest, name: Name) -> Rows:
    """List the jobs of a session."""
    return services.jobs_of(services.get_session(request.principal, name))


@router.post("/sessions/{name}/jobs", response=PLANNED)
@with_dry_run
def start_job(
    request: SignedInRequest,
    name: Name,
    payload: JobIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Start a job."""
    session = matched(services.for_change(request.principal, name), if_match)
    driver = services.get_driver(request.principal, payload.driver)
    if validate_only:
        jobs.check_new_job(request.principal, session, payload.name, driver, payload.orgs)
        jobs.check_may_start(session, payload.name)
        plan = jobs.plan_job(session, payload.name, driver, payload.boxes)
        return _planned(request, session, plan)
    operation = jobs.start_job(
        request.principal,
        session,
        payload.name,
        driver,
        payload.boxes,
        orgs=payload.orgs,
        **payload.asked(),
    )
    return accepted(operation, _needs(session), ETag=etag(session.version))


@router.delete(
    "/sessions/{name}/jobs/{job}", response=answers(OperationOut, 404, 409, 412, 428, status=202)
)
@idempotent
def end_job(request: SignedInRequest, name: Name, job: JobName, if_match: IfMatch) -> Answer:
    """End a job."""
    session = matched(services.for_change(request.principal, name), if_match)
    operation = jobs.end_job(request.principal, session, job)
    return accepted(operation, _needs(session), ETag=etag(session.version))


@listing(router, "/sessions/{name}/streams", StreamOut, 404, by="pk")
def list_streams(request: SignedInRequest, name: Name) -> Rows:
    """List the streams of a session."""
    return services.streams_of(services.get_session(request.principal, name))


@router.get("/sessions/{name}/memory", response=answers(MemoryOut, 404))
def get_memory(request: SignedInRequest, name: Name) -> dict[str, object]:
    """Get the memory of a session by org."""
    session = services.get_session(request.principal, name)
    memory = memory_of(request.principal, session, timezone.now())
    return {
        "at": memory.at,
        "complete": memory.is_whole,
        "granted_bytes": getattr(session, "memory_bytes", 0),
        "by_org": memory.by_org,
    }


# Moving


@router.post("/sessions/{name}/move", response=answers(OperationOut, 404, 409, 412, 428, status=202))
@idempotent
def move_stream(request: SignedInRequest, name: Name, payload: MoveIn, if_match: IfMatch) -> Answer:
    """Move a stream to another node."""
    session = matched(services.for_change(request.principal, name, Role.ON_CALL), if_match)
    stream = services.get_stream(session, payload.stream)
    node = services.get_node(request.principal, session, payload.node)
    operation = moves.move(request.principal, session, stream, node, reason=payload.reason)
    return accepted(operation, _needs(session, Role.ON_CALL), ETag=etag(session.version))


@router.post(
    "/sessions/{name}/restore-rails",
    response={200: RestoreRailsOut, 202: OperationOut, **documented(404, 409, 412, 428)},
)
@with_dry_run
def restore_rails(
    request: SignedInRequest,
    name: Name,
    payload: RestoreRailsIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Restore the rails of a session."""
    session = matched(services.for_change(request.principal, name, Role.ON_CALL), if_match)
    if validate_only:
        plan = moves.check_rails(session, payload.moves_max)
        return Answer(200, [_needs(session, Role.ON_CALL)], read(RestoreRailsOut, plan, request))
    operation = moves.restore_rails(
        request.principal, session, moves_max=payload.moves_max, reason=payload.reason
    )
    return accepted(operation, _needs(session, Role.ON_CALL), ETag=etag(session.version))
