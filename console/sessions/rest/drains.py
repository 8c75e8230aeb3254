"""Draining nodes and boxes, and upgrading nodes, over REST."""

from __future__ import annotations

from typing import Annotated

from ninja import Field, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Input, Reason, ReasonIn
from console.api.idempotency import Answer, ValidateOnly, idempotent, with_dry_run
from console.api.routes import Router, answers, documented
from console.fleet.rest.fleet import Name
from console.operations.api import OperationOut, accepted
from console.sessions.changes import box_drains, drains

router = Router(tags=["sessions"])


IgnoreRedundancy = Annotated[
    bool, Field(description="Whether to go on where columns stored redundantly could be lost.")
]


class DrainIn(ReasonIn):
    ignore_redundancy: IgnoreRedundancy = False


class UpgradeIn(Input):
    version: Annotated[str, Field(max_length=60, pattern=r"^[\x21-\x7e]*$")] = ""
    ignore_redundancy: IgnoreRedundancy = False
    reason: Reason = ""


class DrainMoveOut(Schema):
    stream: str
    target: str = Field(description="The node where it would go.")
    path: str = Field(description="`rail`, `leaf` or `spine`.")
    memory_bytes: int


class DrainPlanOut(Schema):
    """Where streams would go now. What others do meanwhile may change that."""

    moves: list[DrainMoveOut]
    staying: list[str] = Field(description="Of each stream that would stay for now: why.")
    waits_for: str = Field(description="Why none would go yet: columns could be lost. Empty if not so.")


@router.post(
    "/nodes/{name}/drain", response={200: DrainPlanOut, 202: OperationOut, **documented(404, 409)}
)
@with_dry_run
def drain_node(
    request: SignedInRequest, name: Name, payload: DrainIn, validate_only: ValidateOnly = False
) -> Answer:
    """Drain a node, and wait until others have its fragments of redundant columns."""
    if validate_only:
        plan = drains.check_drain(request.principal, name, ignore_redundancy=payload.ignore_redundancy)
        return Answer(200, [Authority(None, Role.ON_CALL)], _planned(plan))
    operation = drains.drain(
        request.principal,
        name,
        ignore_redundancy=payload.ignore_redundancy,
        reason=payload.reason,
    )
    return accepted(operation, Authority(None, Role.ON_CALL))


def _planned(plan: drains.DrainPlan) -> DrainPlanOut:
    moves = [
        DrainMoveOut(
            stream=stream.name,
            target=at.node,
            path=at.tier.name.lower(),
            memory_bytes=stream.memory_bytes,
        )
        for stream, at in plan.moves
    ]
    return DrainPlanOut(moves=moves, staying=plan.staying, waits_for=plan.waits_for)


@router.post("/nodes/{name}/upgrade", response=answers(OperationOut, 404, 409, status=202))
@idempotent
def upgrade_node(request: SignedInRequest, name: Name, payload: UpgradeIn) -> Answer:
    """Upgrade a node: drain it, wait for the new agent, return it to service."""
    operation = drains.upgrade(
        request.principal,
        name,
        version=payload.version,
        ignore_redundancy=payload.ignore_redundancy,
        reason=payload.reason,
    )
    return accepted(operation, Authority(None, Role.ON_CALL))


@router.post("/boxes/{name}/drain", response=answers(OperationOut, 404, 409, status=202))
@idempotent
def drain_box(request: SignedInRequest, name: Name, payload: ReasonIn) -> Answer:
    """Drain a box: wait until its jobs have left it, and give its session another one."""
    operation = box_drains.drain(request.principal, name, reason=payload.reason)
    return accepted(operation, Authority(None, Role.ON_CALL))
