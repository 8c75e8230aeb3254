"""The orgs of a driver over REST."""

from __future__ import annotations

from collections.abc import Sequence

from django.http import HttpRequest, HttpResponse
from ninja import Field, Router, Schema

from console.accounts.browser import requester
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import IfMatch, check_match, etag
from console.api.fields import Input, Reason
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.problems import documented
from console.api.shown import read
from console.fleet import services
from console.fleet.models import Driver
from console.fleet.rest.fleet import Name
from console.operations.api import OperationOut
from console.operations.models import Operation
from console.sessions import driver_orgs
from console.sessions.driver_orgs import Plan
from console.sessions.rest.schemas import OrgsIn, OrgsOut

router = Router(tags=["fleet"])


class DriverOrgsIn(Input):
    orgs: OrgsIn
    reason: Reason = ""


class DriverOrgsOut(Schema):
    """The orgs whose secrets and data keys a driver is told."""

    driver: str
    orgs: OrgsOut
    leaving: list[str] = Field(
        description="Orgs that were taken off the driver, until it has confirmed that it has removed "
        "what it stored of them."
    )
    operations: list[OperationOut] = Field(
        [],
        description="Those that the change has begun, one for each org that was taken off; each ends "
        "with a receipt of that org.",
    )


class DriverOrgsPlanOut(Schema):
    """What would change. Nothing has."""

    before: OrgsOut
    after: OrgsOut
    added: list[str]
    removed: list[str] = Field(description="Orgs of which the driver removes what it stores.")
    warning: str = Field(description="What one stolen driver would give away; empty: nothing unusual.")


def show_plan(plan: Plan) -> DriverOrgsPlanOut:
    return DriverOrgsPlanOut(
        before=driver_orgs.slugs(plan.before),
        after=driver_orgs.slugs(plan.after),
        added=[org.slug for org in plan.added],
        removed=[org.slug for org in plan.removed],
        warning=driver_orgs.ALL_WARNING if plan.after is None else "",
    )


@router.get(
    "/drivers/{name}/orgs",
    response={200: DriverOrgsOut, **documented(404)},
    summary="Get the orgs of a driver",
)
def get_driver_orgs(request: HttpRequest, response: HttpResponse, name: Name) -> dict[str, object]:
    driver = services.get(services.visible_drivers(requester(request)), name)
    response["ETag"] = etag(driver.version)
    return _shown(driver)


@router.patch(
    "/drivers/{name}/orgs",
    response={
        200: DriverOrgsPlanOut | DriverOrgsOut,
        202: DriverOrgsOut,
        **documented(404, 409, 412, 428),
    },
    summary="Set the orgs of a driver",
)
@with_dry_run
def set_driver_orgs(
    request: HttpRequest,
    name: Name,
    payload: DriverOrgsIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    principal = requester(request)
    needs = [Authority(None, Role.PLATFORM_ADMIN)]
    driver = services.for_change(
        principal, services.visible_drivers(principal), name, Role.PLATFORM_ADMIN
    )
    check_match(if_match, driver.version)
    orgs = driver_orgs.resolve(principal, driver_orgs.session_of(driver), payload.orgs)
    if validate_only:
        return Answer(200, needs, show_plan(driver_orgs.plan_orgs(driver, orgs)))
    changed = driver_orgs.set_orgs(principal, driver, orgs, reason=payload.reason)
    return Answer(
        202 if changed.operations else 200,
        needs,
        read(DriverOrgsOut, _shown(driver, changed.operations), request),
        {"ETag": etag(driver.version)},
    )


def _shown(driver: Driver, begun: Sequence[Operation] = ()) -> dict[str, object]:
    return {
        "driver": driver.name,
        "orgs": driver_orgs.slugs(driver_orgs.orgs_of(driver)),
        "leaving": [org.slug for org in driver_orgs.leaving_of(driver)],
        "operations": begun,
    }
