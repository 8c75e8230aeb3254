"""Operations over REST."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from django.http import HttpResponse
from ninja import Field, Path, Query, Schema, Status

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.api.fields import NO_NUL
from console.api.idempotency import Answer
from console.api.pagination import Rows, listing
from console.api.problems import ApiError
from console.api.routes import Router, answers
from console.api.shown import OR_NULL
from console.operations import services
from console.operations.core import State
from console.operations.machines import is_known, machine_of
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
    parameters: dict[str, Any] = Field(
        description="What was asked for beside the target.", examples=[{"version": "0.2.0"}]
    )
    state: State
    done: bool
    progress: ProgressOut
    error: Annotated[ErrorOut | None, OR_NULL] = Field(
        description="Why it is rolling back, or rolled back."
    )
    response: dict[str, Any] | None = Field(
        description="Its result. Exactly one of this and `error` is set once it is done."
    )
    cancel_requested: bool
    started_by: str = Field(validation_alias="actor_name")
    request_id: str
    created_at: datetime
    updated_at: datetime
    done_at: datetime | None

    @staticmethod
    def resolve_parameters(operation: Operation) -> dict[str, Any]:
        kind = operation.kind
        return machine_of(kind).parameters(operation) if is_known(kind) else {}

    @staticmethod
    def resolve_progress(operation: Operation) -> Operation:
        return operation


def address_of(operation: Operation) -> str:
    return f"/api/v1/operations/{operation.pk}"


def accepted(operation: Operation, needs: Authority, **headers: str) -> Answer:
    """202: it was begun, and here it can be followed."""
    shown = OperationOut.from_orm(operation)  # it has just begun, and has found out nothing
    return Answer(202, [needs], shown, {"Location": address_of(operation), **headers})


def busy(error: services.Busy) -> ApiError:
    """409 with a link to the one that is in the way."""
    link = f'<{address_of(error.operation)}>; rel="related"'
    return ApiError("OperationRunning", str(error), headers={"Link": link})


@listing(router, "/operations", OperationOut, by="-id")
def list_operations(
    request: SignedInRequest,
    target: Annotated[
        str, Query(max_length=120, pattern=NO_NUL, description="For example `session:chat`.")
    ] = "",
    kind: Annotated[
        str, Query(max_length=48, pattern=NO_NUL, description="`session` also matches `session.resize`.")
    ] = "",
    done: Annotated[bool | None, Query()] = None,
) -> Rows:
    """List operations."""
    found = services.visible_operations(request.principal)
    found = services.filtered(found, target=target, kind=kind, done=done)
    return found, partial(without_places, request.principal)


@router.get("/operations/{operation_id}", response=answers(OperationOut, 404))
def get_operation(request: SignedInRequest, operation_id: OperationId) -> Operation:
    """Get an operation."""
    return without_places(request.principal, services.get_operation(request.principal, operation_id))


@router.delete("/operations/{operation_id}", response=answers(OperationOut, 404, 409, status=202))
def cancel_operation(
    request: SignedInRequest, response: HttpResponse, operation_id: OperationId
) -> Status[Operation]:
    """Cancel an operation and roll it back."""
    operation = services.cancel(request.principal, operation_id)
    response["Location"] = address_of(operation)
    return Status(202, without_places(request.principal, operation))


@router.post("/operations/{operation_id}/retry", response=answers(OperationOut, 404, 409, status=202))
def retry_operation(
    request: SignedInRequest, response: HttpResponse, operation_id: OperationId
) -> Status[Operation]:
    """Retry a stuck operation."""
    operation = services.retry(request.principal, operation_id)
    response["Location"] = address_of(operation)
    return Status(202, without_places(request.principal, operation))
