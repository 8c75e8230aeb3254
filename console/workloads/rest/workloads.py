"""Workloads over REST."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from ninja import Path, Query

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import etag, matched, tagged
from console.api.fields import IfMatch, SearchText
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.pagination import Rows, listing
from console.api.problems import ApiError
from console.api.routes import Router, answers, documented
from console.api.shown import read
from console.live import access
from console.workloads import changes, logs, services
from console.workloads.models import INSTANCE_NAME_MAX, Workload
from console.workloads.plans import Plan
from console.workloads.rest.schemas import (
    InstanceOut,
    RevisionOut,
    RolloutOut,
    ScaleIn,
    SpecIn,
    SpecPatch,
    WorkloadEventOut,
    WorkloadOut,
    WorkloadPlanOut,
    WorkloadReasonIn,
    WorkloadUndoIn,
    rollout_shown,
    workload_shown,
)
from console.workloads.spec import NAME_MAX, WORKLOAD_NAME, WorkloadSpec
from telemetry.events import events_of

router = Router(tags=["workloads"])

Name = Annotated[str, Path(pattern=WORKLOAD_NAME, max_length=NAME_MAX, description="The workload.")]
Number = Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of the revision.")]
CHANGED = {**answers(WorkloadOut, 404, 409, 412, 428)}
INSTANCE_NAME = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
PLANNED = {**answers(WorkloadOut | WorkloadPlanOut, 404, 409, 412, 428)}


@listing(router, "/workloads", WorkloadOut, 404, by="name", is_plain=True)
def list_workloads(
    request: SignedInRequest,
    org: Annotated[str, Query(max_length=48, pattern=r"^[a-z0-9-]*$")] = "",
    q: SearchText = "",
    ready: Annotated[bool | None, Query(description="Only workloads that are ready, or not.")] = None,
) -> Rows:
    """List workloads."""
    found = services.visible_workloads(request.principal)
    rows = services.shown(services.filtered(found, org=org, q=q, ready=ready))
    return rows, partial(workload_shown, principal=request.principal)


@router.post(
    "/workloads",
    response={200: WorkloadPlanOut, 201: WorkloadOut, **documented(404, 409, 412)},
)
@with_dry_run
def create_workload(
    request: SignedInRequest, payload: SpecIn, validate_only: ValidateOnly = False
) -> Answer:
    """Create a workload.

    Its boxes are reserved at once; instances follow. A dry run answers with the plan.
    """
    principal, wanted = request.principal, payload.wanted()
    if validate_only:
        plan = changes.plan_new(principal, wanted)
        org = services.owner_of(principal, wanted.org)
        needs = [Authority(org.pk if org else None, Role.ORG_ADMIN)]
        return Answer(200, needs, read(WorkloadPlanOut, plan, request))
    workload = changes.create(principal, wanted, **payload.asked())
    headers = {"Location": f"/api/v1/workloads/{workload.name}", "ETag": etag(workload.version)}
    return Answer(201, _needs(workload), _shown(request, workload), headers)


@router.get("/workloads/{name}", response=answers(WorkloadOut, 404))
def get_workload(request: SignedInRequest, response: HttpResponse, name: Name) -> dict[str, object]:
    """Get a workload."""
    found = tagged(response, services.get_shown(request.principal, name))
    return workload_shown(found, request.principal)


@router.put("/workloads/{name}", response=PLANNED)
@with_dry_run
def replace_workload(
    request: SignedInRequest,
    name: Name,
    payload: SpecIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Replace the spec of a workload."""
    workload = matched(services.for_change(request.principal, name), if_match)
    wanted = payload.wanted()
    return _apply(request, workload, wanted, payload, validate_only=validate_only)


@router.patch("/workloads/{name}", response=PLANNED)
@with_dry_run
def update_workload(
    request: SignedInRequest,
    name: Name,
    payload: SpecPatch,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Change parts of the spec of a workload."""
    workload = matched(services.for_change(request.principal, name), if_match)
    wanted = payload.wanted(workload)
    return _apply(request, workload, wanted, payload, validate_only=validate_only)


@router.delete("/workloads/{name}", response=answers(WorkloadOut, 404, 409, 412, 428, status=202))
@with_dry_run
def delete_workload(request: SignedInRequest, name: Name, if_match: IfMatch) -> Answer:
    """Delete a workload.

    Its instances finish the requests that are running; then its session ends and it is gone.
    """
    workload = matched(services.for_change(request.principal, name), if_match)
    changes.delete(request.principal, workload)
    return _changed(request, workload, status=202)


@router.post("/workloads/{name}/scale", response=PLANNED)
@with_dry_run
def scale_workload(
    request: SignedInRequest,
    name: Name,
    payload: ScaleIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Set the number of replicas of a workload."""
    workload = matched(services.for_change(request.principal, name), if_match)
    wanted = changes.scaled(workload, payload.replicas)
    return _apply(request, workload, wanted, payload, validate_only=validate_only)


@router.post("/workloads/{name}/restart", response=CHANGED)
@with_dry_run
def restart_workload(
    request: SignedInRequest, name: Name, payload: WorkloadReasonIn, if_match: IfMatch
) -> Answer:
    """Replace the instances of a workload by new ones of the same revision."""
    return _act(request, name, if_match, changes.restart, payload.reason)


@router.post("/workloads/{name}/pause", response=CHANGED)
@with_dry_run
def pause_workload(
    request: SignedInRequest, name: Name, payload: WorkloadReasonIn, if_match: IfMatch
) -> Answer:
    """Pause rollouts of a workload.

    Scaling continues, and failed instances are replaced, once a revision has been rolled out.
    """
    return _act(request, name, if_match, changes.pause, payload.reason)


@router.post("/workloads/{name}/resume", response=CHANGED)
@with_dry_run
def resume_workload(
    request: SignedInRequest, name: Name, payload: WorkloadReasonIn, if_match: IfMatch
) -> Answer:
    """Resume rollouts of a workload."""
    return _act(request, name, if_match, changes.resume, payload.reason)


@router.post("/workloads/{name}/undo", response=CHANGED)
@with_dry_run
def undo_workload(
    request: SignedInRequest, name: Name, payload: WorkloadUndoIn, if_match: IfMatch
) -> Answer:
    """Roll a workload back to an earlier revision.

    That is a new revision, equal to the earlier one. Replicas, orgs and rollout bounds stay.
    """
    workload = matched(services.for_change(request.principal, name, Role.ON_CALL), if_match)
    changes.roll_back(request.principal, workload, payload.revision, reason=payload.reason)
    return _changed(request, workload, Role.ON_CALL)


# What it has been, and what runs


@listing(router, "/workloads/{name}/revisions", RevisionOut, 404, by="-number")
def list_revisions(request: SignedInRequest, name: Name) -> Rows:
    """List the revisions of a workload, the latest first."""
    workload = services.get_workload(request.principal, name)
    return services.revisions_of(workload).select_related("workload")


@router.get("/workloads/{name}/revisions/{number}", response=answers(RevisionOut, 404))
def get_revision(request: SignedInRequest, name: Name, number: Number) -> object:
    """Get a revision of a workload."""
    return services.get_revision(services.get_workload(request.principal, name), number)


@listing(router, "/workloads/{name}/instances", InstanceOut, 404, by="-pk")
def list_instances(
    request: SignedInRequest,
    name: Name,
    ended: Annotated[bool | None, Query(description="Only those that have ended, or not.")] = None,
) -> Rows:
    """List the instances of a workload, the latest first."""
    return services.instances_of(services.get_workload(request.principal, name), ended=ended)


@listing(router, "/workloads/{name}/rollouts", RolloutOut, 404, by="-pk")
def list_rollouts(request: SignedInRequest, name: Name) -> Rows:
    """List the rollouts of a workload, the latest first."""
    workload = services.get_workload(request.principal, name)
    return services.with_shown(workload.rollouts.all()), lambda rollout: rollout_shown(rollout.shown)


@listing(router, "/workloads/{name}/events", WorkloadEventOut, 404, by="-pk")
def list_events(request: SignedInRequest, name: Name) -> Rows:
    """List what happened to a workload, the latest first."""
    return events_of(services.get_workload(request.principal, name).topic)


Instance = Annotated[
    str, Query(pattern=INSTANCE_NAME, max_length=INSTANCE_NAME_MAX, description="An instance of it.")
]
Lines = Annotated[
    int, Query(alias="tail", ge=1, le=logs.LINES_MAX, description="How many of the last lines.")
]
Follow = Annotated[
    bool,
    Query(
        description="Send what is written as it comes, until the instance has ended. If it ends for "
        "another reason, the last line begins with `--- ` and says which."
    ),
]


@router.get(
    "/workloads/{name}/logs",
    response=answers(str, 404, 429, 503),
    openapi_extra={"responses": {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}},
)
def get_logs(
    request: SignedInRequest,
    name: Name,
    instance: Instance,
    lines: Lines = logs.LINES,
    follow: Follow = False,
) -> HttpResponseBase:
    """Get the log of an instance: the manager's and its engine's."""
    found = services.get_instance(services.get_workload(request.principal, name), instance)
    kind = "text/plain; charset=utf-8"
    try:
        if not follow:
            return HttpResponse(logs.tail(found.name, lines), content_type=kind)
        logs.FOLLOWERS.check(request.principal.owner)
        logs.tail(found.name, 1)  # what is wrong is told as a problem, before the answer begins
    except logs.NoLog as error:
        raise ApiError("Unavailable", str(error), headers={"Retry-After": "5"}) from error
    except logs.TooManyFollowers as error:
        raise ApiError("TooManyAttempts", str(error), headers={"Retry-After": "30"}) from error
    credential = access.credential_of_request(request)

    def may_see() -> bool:
        principal = access.principal_of(credential)
        if principal is None:
            return False
        return services.visible_workloads(principal).filter(pk=found.workload_id).exists()

    pieces = logs.follow(found.name, lines, owner=request.principal.owner, may_see=may_see)
    return StreamingHttpResponse(pieces, content_type=kind)


# What they have in common


def _apply(
    request: SignedInRequest,
    workload: Workload,
    wanted: WorkloadSpec,
    payload: SpecIn | SpecPatch | ScaleIn,
    *,
    validate_only: bool,
) -> Answer:
    if validate_only:
        plan: Plan = changes.plan_change(request.principal, workload, wanted)
        return Answer(200, _needs(workload), read(WorkloadPlanOut, plan, request))
    changes.update(request.principal, workload, wanted, **payload.asked())
    return _changed(request, workload)


def _act(
    request: SignedInRequest,
    name: str,
    if_match: str,
    change: Callable[..., Workload],
    reason: str,
) -> Answer:
    workload = matched(services.for_change(request.principal, name, Role.ON_CALL), if_match)
    change(request.principal, workload, reason=reason)
    return _changed(request, workload, Role.ON_CALL)


def _changed(
    request: SignedInRequest, workload: Workload, role: Role = Role.ORG_ADMIN, status: int = 200
) -> Answer:
    headers = {"ETag": etag(workload.version)}
    return Answer(status, _needs(workload, role), _shown(request, workload), headers)


def _shown(request: SignedInRequest, workload: Workload) -> WorkloadOut:
    found = services.get_shown(request.principal, workload.name)
    return read(WorkloadOut, workload_shown(found, request.principal), request)


def _needs(workload: Workload, role: Role = Role.ORG_ADMIN) -> list[Authority]:
    return [Authority(workload.org_id, role)]
