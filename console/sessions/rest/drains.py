"""Draining nodes and boxes, and upgrading nodes, over REST."""

from __future__ import annotations

from typing import Annotated

from ninja import Field

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Input, Reason, ReasonIn
from console.api.idempotency import Answer, idempotent
from console.api.routes import Router, answers
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


@router.post("/nodes/{name}/drain", response=answers(OperationOut, 404, 409, status=202))
@idempotent
def drain_node(request: SignedInRequest, name: Name, payload: DrainIn) -> Answer:
    """Drain a node, and wait until others have its fragments of redundant columns."""
    operation = drains.drain(
        request.principal,
        name,
        ignore_redundancy=payload.ignore_redundancy,
        reason=payload.reason,
    )
    return accepted(operation, Authority(None, Role.ON_CALL))


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
