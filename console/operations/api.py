"""Operations over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from ninja import Field, Path, Query, Router, Schema, Status

from console.accounts.browser import requester
from console.accounts.principal import SYSTEM, Authority, Principal
from console.api.fields import NO_NUL
from console.api.idempotency import Answer
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import ApiError, documented
from console.operations import services
from console.operations.core import State
from console.operations.models import Operation
from console.visibility import without_places

router = Router(tags=["operations"])

OperationId = Annotated[UUID, Path(description="The operation.")]


class ProgressOut(Schema):
    step: int = Field(description="Completed steps.")
    total: int
    percent: int
    message: str


class ErrorOut(Schema):
    reason: str
    detail: str


class OperationOut(Schema):
    id: UUID
    kind: str
    target: str = Field(description="Its target, as a topic.", examples=["session:chat"])
    sentence: str
    state: State
    done: bool
    progress: ProgressOut
    error: ErrorOut | None = Field(description="Why it is rolling back, or rolled back.")
    response: dict[str, Any] | None = Field(
        description="Its result. Exactly one of this and `error` is set once it is done."
    )
    cancel_requested: bool
    started_by: str
    request_id: str
    created_at: datetime
    updated_at: datetime
    done_at: datetime | None


def show_operation(operation: Operation, principal: Principal) -> OperationOut:
    operation = without_places(principal, operation)
    return OperationOut(
        id=operation.pk,
        kind=operation.kind,
        target=operation.target,
        sentence=operation.sentence,
        state=State(operation.state),
        done=operation.done,
        progress=ProgressOut(
            step=operation.step,
            total=operation.total,
            percent=operation.percent,
            message=operation.message,
        ),
        error=ErrorOut(**operation.error) if operation.error else None,
        response=operation.response,
        cancel_requested=operation.cancel_requested,
        started_by=operation.actor_name,
        request_id=operation.request_id,
        created_at=operation.created_at,
        updated_at=operation.updated_at,
        done_at=operation.done_at,
    )


def address_of(operation: Operation) -> str:
    return f"/api/v1/operations/{operation.pk}"


def accepted(operation: Operation, needs: Authority, **headers: str) -> Answer:
    """202: it was begun, and here it can be followed."""
    shown = show_operation(operation, SYSTEM)  # it has just begun, and has found out nothing
    return Answer(202, [needs], shown, {"Location": address_of(operation), **headers})


def busy(error: services.Busy) -> ApiError:
    """409 with a link to the one that is in the way."""
    link = f'<{address_of(error.operation)}>; rel="related"'
    return ApiError("OperationRunning", str(error), headers={"Link": link})


@router.get("/operations", response={200: Page[OperationOut], **documented()}, summary="List operations")
def list_operations(
    request: HttpRequest,
    target: Annotated[
        str, Query(max_length=120, pattern=NO_NUL, description="For example `session:chat`.")
    ] = "",
    kind: Annotated[
        str, Query(max_length=48, pattern=NO_NUL, description="`session` also matches `session.resize`.")
    ] = "",
    done: Annotated[bool | None, Query()] = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    principal = requester(request)
    found = services.visible_operations(principal)
    found = services.filtered(found, target=target, kind=kind, done=done)
    return paginate(found, "-id", cursor, limit, lambda one: show_operation(one, principal))


@router.get(
    "/operations/{operation_id}",
    response={200: OperationOut, **documented(404)},
    summary="Get an operation",
)
def get_operation(request: HttpRequest, operation_id: OperationId) -> OperationOut:
    principal = requester(request)
    return show_operation(services.get_operation(principal, operation_id), principal)


@router.delete(
    "/operations/{operation_id}",
    response={202: OperationOut, **documented(404)},
    summary="Cancel an operation and roll it back",
)
def cancel_operation(
    request: HttpRequest, response: HttpResponse, operation_id: OperationId
) -> Status[OperationOut]:
    principal = requester(request)
    operation = services.cancel(principal, operation_id)
    response["Location"] = address_of(operation)
    return Status(202, show_operation(operation, principal))


@router.post(
    "/operations/{operation_id}/retry",
    response={202: OperationOut, **documented(404, 409)},
    summary="Retry a stuck operation",
)
def retry_operation(
    request: HttpRequest, response: HttpResponse, operation_id: OperationId
) -> Status[OperationOut]:
    principal = requester(request)
    try:
        operation = services.retry(principal, operation_id)
    except services.NotStuck as error:
        raise ApiError("Conflict", str(error)) from None
    response["Location"] = address_of(operation)
    return Status(202, show_operation(operation, principal))
