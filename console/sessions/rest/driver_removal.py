"""Removing drivers over REST."""

from __future__ import annotations

from datetime import datetime

from django.http import HttpRequest
from ninja import Field, Router, Schema

from console.accounts.browser import requester
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Input, Reason
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.problems import documented
from console.api.shown import NameOf, read
from console.fleet import services
from console.fleet.rest.fleet import Name
from console.operations.api import OperationOut, accepted
from console.sessions.changes import driver_removal
from console.sessions.changes.driver_removal import Consequences
from console.sessions.models import Session
from console.sessions.rest.schemas import PlanToken

router = Router(tags=["fleet"])


class RemoveDriverIn(Input):
    reason: Reason = ""
    plan_token: PlanToken = None


class RemovalOut(Schema):
    """What would become of it. Nothing has."""

    plan_token: str = Field(validation_alias="token")
    alive: bool = Field(validation_alias="is_alive", description="If true, stop its process first.")
    last_heartbeat_at: datetime | None = Field(validation_alias="driver.last_heartbeat_at")
    session: NameOf | None = Field(description="The session of its job, which ends.")
    job: NameOf | None
    streams: int
    memory_bytes: int
    nodes: list[str] = Field(description="Nodes whose memory is freed.")
    waiting: list[str] = Field(
        description="Operations that wait for it or change its streams; they continue without it."
    )

    @staticmethod
    def resolve_session(found: Consequences) -> Session | None:
        return found.job.session if found.job else None

    @staticmethod
    def resolve_waiting(found: Consequences) -> list[str]:
        return [str(one.pk) for one in (*found.waiting, *found.moving)]


@router.post(
    "/drivers/{name}/remove",
    response={200: RemovalOut, 202: OperationOut, **documented(404, 409, 412)},
    summary="Remove a driver and end its job",
)
@with_dry_run
def remove_driver(
    request: HttpRequest,
    name: Name,
    payload: RemoveDriverIn,
    validate_only: ValidateOnly = False,
) -> Answer:
    principal = requester(request)
    needs = Authority(None, Role.PLATFORM_ADMIN)
    if validate_only:
        driver = services.for_change(
            principal, services.visible_drivers(principal), name, Role.PLATFORM_ADMIN
        )
        return Answer(200, [needs], read(RemovalOut, driver_removal.consequences(driver), request))
    operation = driver_removal.remove(
        principal, name, plan_token=payload.plan_token, reason=payload.reason
    )
    return accepted(operation, needs)
