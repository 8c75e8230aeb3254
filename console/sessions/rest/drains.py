"""Draining and upgrading nodes over REST."""

from __future__ import annotations

from typing import Annotated

from django.http import HttpRequest
from ninja import Field, Path, Router

from console.accounts.browser import requester
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Input, Reason
from console.api.idempotency import Answer, idempotent
from console.api.problems import documented
from console.fleet.models import NAME
from console.operations.api import OperationOut, accepted
from console.sessions.changes import drains

router = Router(tags=["sessions"])

NodeName = Annotated[str, Path(pattern=NAME, max_length=63)]


class UpgradeIn(Input):
    version: Annotated[str, Field(max_length=60, pattern=r"^[\x21-\x7e]*$")] = ""
    reason: Reason = ""


class DrainIn(Input):
    reason: Reason = ""


@router.post(
    "/nodes/{name}/drain",
    response={202: OperationOut, **documented(404, 409)},
    summary="Drain a node",
)
@idempotent
def drain_node(request: HttpRequest, name: NodeName, payload: DrainIn) -> Answer:
    principal = requester(request)
    return accepted(drains.drain(principal, name, reason=payload.reason), Authority(None, Role.ON_CALL))


@router.post(
    "/nodes/{name}/upgrade",
    response={202: OperationOut, **documented(404, 409)},
    summary="Upgrade a node: drain it, wait for the new agent, return it to service",
)
@idempotent
def upgrade_node(request: HttpRequest, name: NodeName, payload: UpgradeIn) -> Answer:
    principal = requester(request)
    operation = drains.upgrade(principal, name, version=payload.version, reason=payload.reason)
    return accepted(operation, Authority(None, Role.ON_CALL))
