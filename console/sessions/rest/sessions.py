"""Sessions over REST."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from ninja import Path, Query, Router

from console.accounts.browser import requester
from console.accounts.principal import Authority, Principal
from console.accounts.roles import Role
from console.api.etags import IfMatch, check_match, etag
from console.api.idempotency import Answer, ValidateOnly, idempotent, with_dry_run
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.operations.api import OperationOut, accepted
from console.orgs.models import SLUG, Org
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
    show_job,
    show_memory,
    show_plan,
    show_rails_plan,
    show_session,
    show_stream,
)
from console.visibility import Sight

router = Router(tags=["sessions"])

Name = Annotated[str, Path(pattern=SLUG, max_length=48, description="The session.")]
JobName = Annotated[str, Path(pattern=SLUG, max_length=48)]
PLANNED: dict[Any, Any] = {200: PlanOut, 202: OperationOut, **documented(404, 409, 412, 428)}


@router.get("/sessions", response={200: Page[SessionOut], **documented()}, summary="List sessions")
def list_sessions(
    request: HttpRequest,
    org: Annotated[str, Query(max_length=48, pattern=r"^[a-z0-9-]*$")] = "",
    waiting: Annotated[bool | None, Query(description="Only sessions that are waiting, or not.")] = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    found = services.visible_sessions(requester(request))
    found = services.filtered(found, org=org, waiting=waiting)
    return paginate(found, "name", cursor, limit, show_session)


@router.post(
    "/sessions",
    response={200: PlanOut, 202: OperationOut, **documented(404, 409, 412)},
    summary="Create a session",
)
@with_dry_run
def create_session(
    request: HttpRequest, payload: SessionIn, validate_only: ValidateOnly = False
) -> Answer:
    principal = requester(request)
    org = get_org(principal, payload.org) if payload.org else None
    services.check_may_create(principal, org)
    session = _new(payload, org)
    if validate_only:
        return Answer(
            200, [_needs(session)], _shown_plan(principal, sizes.plan_size(session, payload.boxes))
        )
    operation = sizes.create(
        principal,
        session,
        wait_seconds=payload.wait_seconds,
        plan_token=payload.plan_token,
        reason=payload.reason,
    )
    return accepted(operation, _needs(session))


def _new(payload: SessionIn, org: Org | None) -> Session:
    return sizes.new_session(
        payload.name,
        org,
        payload.boxes,
        path=payload.path or "",
        bytes_per_token=payload.bytes_per_token,
    )


@router.get("/sessions/{name}", response={200: SessionOut, **documented(404)}, summary="Get a session")
def get_session(request: HttpRequest, response: HttpResponse, name: Name) -> SessionOut:
    session = services.get_session(requester(request), name)
    response["ETag"] = etag(session.version)
    return show_session(session)


@router.post(
    "/sessions/{name}/resize",
    response=PLANNED,
    summary="Resize a session",
)
@with_dry_run
def resize_session(
    request: HttpRequest,
    name: Name,
    payload: ResizeIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    principal = requester(request)
    session = _for_change(principal, name, if_match)
    if validate_only:
        return Answer(
            200, [_needs(session)], _shown_plan(principal, sizes.plan_size(session, payload.boxes))
        )
    operation = sizes.resize(
        principal,
        session,
        payload.boxes,
        wait_seconds=payload.wait_seconds,
        plan_token=payload.plan_token,
        reason=payload.reason,
    )
    return accepted(operation, _needs(session), ETag=etag(session.version))


@router.delete(
    "/sessions/{name}",
    response={202: OperationOut, **documented(404, 409, 412, 428)},
    summary="Delete a session",
)
@idempotent
def delete_session(
    request: HttpRequest,
    name: Name,
    if_match: IfMatch,
    end_jobs: Annotated[bool, Query(description="Also end its jobs.")] = False,
) -> Answer:
    principal = requester(request)
    session = _for_change(principal, name, if_match)
    return accepted(sizes.delete(principal, session, end_jobs=end_jobs), _needs(session))


def _for_change(
    principal: Principal, name: str, if_match: str, at_least: Role = Role.ORG_ADMIN
) -> Session:
    session = services.for_change(principal, name, at_least)
    check_match(if_match, session.version)
    return session


def _shown_plan(principal: Principal, plan: Proposal) -> PlanOut:
    return show_plan(plan, Sight(principal))


def _needs(session: Session, role: Role = Role.ORG_ADMIN) -> Authority:
    return Authority(session.org_id, role)


# Jobs and streams


@router.get(
    "/sessions/{name}/jobs",
    response={200: Page[JobOut], **documented(404)},
    summary="List the jobs of a session",
)
def list_jobs(
    request: HttpRequest, name: Name, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    session = services.get_session(requester(request), name)
    return paginate(services.jobs_of(session), "pk", cursor, limit, show_job)


@router.post(
    "/sessions/{name}/jobs",
    response=PLANNED,
    summary="Start a job",
)
@with_dry_run
def start_job(
    request: HttpRequest,
    name: Name,
    payload: JobIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    principal = requester(request)
    session = _for_change(principal, name, if_match)
    driver = services.get_driver(principal, payload.driver)
    if validate_only:
        plan = jobs.plan_job(session, payload.name, driver, payload.boxes)
        return Answer(200, [_needs(session)], _shown_plan(principal, plan))
    operation = jobs.start_job(
        principal,
        session,
        payload.name,
        driver,
        payload.boxes,
        wait_seconds=payload.wait_seconds,
        plan_token=payload.plan_token,
        reason=payload.reason,
    )
    return accepted(operation, _needs(session), ETag=etag(session.version))


@router.delete(
    "/sessions/{name}/jobs/{job}",
    response={202: OperationOut, **documented(404, 409, 412, 428)},
    summary="End a job",
)
@idempotent
def end_job(request: HttpRequest, name: Name, job: JobName, if_match: IfMatch) -> Answer:
    principal = requester(request)
    session = _for_change(principal, name, if_match)
    operation = jobs.end_job(principal, session, job)
    return accepted(operation, _needs(session), ETag=etag(session.version))


@router.get(
    "/sessions/{name}/streams",
    response={200: Page[StreamOut], **documented(404)},
    summary="List the streams of a session",
)
def list_streams(
    request: HttpRequest, name: Name, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    principal = requester(request)
    session, sight = services.get_session(principal, name), Sight(principal)
    shown = partial(show_stream, sight=sight)
    return paginate(services.streams_of(session), "pk", cursor, limit, shown)


@router.get(
    "/sessions/{name}/memory",
    response={200: MemoryOut, **documented(404)},
    summary="Get the memory of a session by org",
)
def get_memory(request: HttpRequest, name: Name) -> MemoryOut:
    principal = requester(request)
    session = services.get_session(principal, name)
    return show_memory(session, memory_of(principal, session, timezone.now()))


# Moving


@router.post(
    "/sessions/{name}/move",
    response={202: OperationOut, **documented(404, 409, 412, 428)},
    summary="Move a stream to another node",
)
@idempotent
def move_stream(request: HttpRequest, name: Name, payload: MoveIn, if_match: IfMatch) -> Answer:
    principal = requester(request)
    session = _for_change(principal, name, if_match, Role.ON_CALL)
    stream = services.get_stream(session, payload.stream)
    node = services.get_node(principal, session, payload.node)
    operation = moves.move(principal, session, stream, node, reason=payload.reason)
    return accepted(operation, _needs(session, Role.ON_CALL), ETag=etag(session.version))


@router.post(
    "/sessions/{name}/restore-rails",
    response={200: RestoreRailsOut, 202: OperationOut, **documented(404, 409, 412, 428)},
    summary="Restore the rails of a session",
)
@with_dry_run
def restore_rails(
    request: HttpRequest,
    name: Name,
    payload: RestoreRailsIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    principal = requester(request)
    session = _for_change(principal, name, if_match, Role.ON_CALL)
    if validate_only:
        plan = moves.plan_rails(session, payload.moves_max)
        return Answer(200, [_needs(session, Role.ON_CALL)], show_rails_plan(plan))
    operation = moves.restore_rails(
        principal, session, moves_max=payload.moves_max, reason=payload.reason
    )
    return accepted(operation, _needs(session, Role.ON_CALL), ETag=etag(session.version))
