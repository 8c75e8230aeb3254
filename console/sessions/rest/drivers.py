"""Drivers over REST: the orgs that one may serve, who stores its fragments, and removing one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.http import HttpResponse
from ninja import Field, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import check_match, etag
from console.api.fields import IfMatch, Input, Reason
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.routes import Router, answers, documented
from console.api.shown import NameOf, read
from console.fleet import services
from console.fleet.models import Driver
from console.fleet.rest.fleet import Name
from console.operations.api import OperationOut, accepted
from console.operations.models import Operation
from console.sessions import driver_orgs, redundancy
from console.sessions.changes import driver_removal
from console.sessions.changes.driver_removal import Consequences
from console.sessions.driver_orgs import Plan
from console.sessions.models import Session
from console.sessions.redundancy import Row
from console.sessions.rest.schemas import OrgsIn, OrgsOut, PlanToken, RedundancyName

router = Router(tags=["fleet"])


# Its orgs


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


@router.get("/drivers/{name}/orgs", response=answers(DriverOrgsOut, 404))
def get_driver_orgs(request: SignedInRequest, response: HttpResponse, name: Name) -> dict[str, object]:
    """Get the orgs of a driver."""
    driver = services.get(services.visible_drivers(request.principal), name)
    response["ETag"] = etag(driver.version)
    return _shown(driver)


@router.patch(
    "/drivers/{name}/orgs",
    response={
        200: DriverOrgsPlanOut | DriverOrgsOut,
        202: DriverOrgsOut,
        **documented(404, 409, 412, 428),
    },
)
@with_dry_run
def set_driver_orgs(
    request: SignedInRequest,
    name: Name,
    payload: DriverOrgsIn,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Set the orgs of a driver."""
    needs = [Authority(None, Role.PLATFORM_ADMIN)]
    driver = services.for_change(request.principal, services.visible_drivers, name, Role.PLATFORM_ADMIN)
    check_match(if_match, driver.version)
    orgs = driver_orgs.resolve(request.principal, driver_orgs.session_of(driver), payload.orgs)
    if validate_only:
        return Answer(200, needs, show_plan(driver_orgs.plan_orgs(driver, orgs)))
    changed = driver_orgs.set_orgs(request.principal, driver, orgs, reason=payload.reason)
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


# Who stores its fragments


class HolderOut(Schema):
    """An agent that stores one fragment of each redundant column of a shard."""

    place: int = Field(description="The number of the fragment.")
    node: str
    since: datetime = Field(description="When it was assigned.")
    reachable: bool | None = Field(
        description="Whether the agent of the shard can reach it. Null: not reported."
    )


class ReportedRedundancyOut(Schema):
    state: str = Field(description="indexing, ready or refused.")
    reason: str = Field(description="Why it is not ready.")
    columns: int = Field(
        description="Columns that are stored redundantly, as far as the agent has listed them."
    )
    incomplete: int = Field(
        description="Columns that are known to lack a fragment; not what holders in `unreachable` lack."
    )
    incomplete_at: dict[str, int] = Field(
        description="By node, the columns that lack its fragment; only where some do."
    )
    most_lacking: int = Field(description="Fragments that one of these columns lacks at most.")
    unreachable: list[str] = Field(
        description="Nodes of holders that the agent can't reach; of former ones the address."
    )
    holders_since: datetime | None = Field(
        description="When the newest holder came that this is about. Null: the agent does not know."
    )
    repaired: int = Field(
        description="Columns whose missing fragments were stored again, since the agent opened them."
    )
    seen_at: datetime = Field(description="When the agent reported it.")


_REPORTED = (
    *("state", "columns", "incomplete", "most_lacking", "holders_since", "repaired", "seen_at"),
)


class ShardRedundancyOut(Schema):
    stream: NameOf
    group: str = Field(validation_alias="stream.group")
    index: int = Field(validation_alias="stream.index")
    redundancy: RedundancyName = Field(
        validation_alias="code", description="Fragments with data + with parity; `none` without holders."
    )
    asked: RedundancyName = Field(description="By the rules of its session.")
    why: str = Field(description="Why it is not as asked, or why a holder that leaves is not replaced.")
    holders: list[HolderOut] = Field(description="In the order of their fragments.")
    bytes_per_second: int | None = Field(
        description="At what rate its fragments may move, spills and repair together. Null: any."
    )
    link: str | None = Field(description="The link that allows no more.")
    reported: ReportedRedundancyOut | None = Field(
        description="By the agent that has the shard. Null: nothing yet."
    )

    @staticmethod
    def resolve_bytes_per_second(row: Row) -> int | None:
        return row.budget.bytes_per_second if row.budget else None

    @staticmethod
    def resolve_link(row: Row) -> str | None:
        return str(row.budget.link) if row.budget else None

    @staticmethod
    def resolve_reported(row: Row) -> dict[str, object] | None:
        if row.said is None:
            return None
        return {
            **{name: getattr(row.said, name) for name in _REPORTED},
            **{name: getattr(row, name) for name in ("reason", "incomplete_at", "unreachable")},
        }

    @staticmethod
    def resolve_holders(row: Row) -> list[dict[str, object]]:
        return [
            {
                "place": one.place,
                "node": one.node.name,
                "since": one.since,
                "reachable": row.reaches(one),
            }
            for one in row.holders
        ]


class DriverRedundancyOut(Schema):
    """How the columns of a driver's shards are stored redundantly in tier 2."""

    driver: str
    redundancy: RedundancyName | None = Field(
        description="Of shards with different ones the weakest; null: no job runs."
    )
    asked: RedundancyName | None = Field(description="By the rules of its session; null: no job runs.")
    incomplete: int = Field(description="Columns of all shards that are known to lack a fragment.")
    shards: list[ShardRedundancyOut] = Field(description="None without a running job.")


@router.get("/drivers/{name}/redundancy", response=answers(DriverRedundancyOut, 404))
def get_driver_redundancy(request: SignedInRequest, name: Name) -> dict[str, object]:
    """Get the redundancy of a driver."""
    driver = services.get(services.visible_drivers(request.principal), name)
    rows = redundancy.of_driver(driver)
    return {
        "driver": driver.name,
        "redundancy": redundancy.weakest(row.code for row in rows) if rows else None,
        "asked": rows[0].asked if rows else None,
        "incomplete": sum(row.said.incomplete for row in rows if row.said),
        "shards": rows,
    }


# Removing one


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
    "/drivers/{name}/remove", response={200: RemovalOut, 202: OperationOut, **documented(404, 409, 412)}
)
@with_dry_run
def remove_driver(
    request: SignedInRequest,
    name: Name,
    payload: RemoveDriverIn,
    validate_only: ValidateOnly = False,
) -> Answer:
    """Remove a driver and end its job."""
    needs = Authority(None, Role.PLATFORM_ADMIN)
    if validate_only:
        driver = services.for_change(
            request.principal, services.visible_drivers, name, Role.PLATFORM_ADMIN
        )
        return Answer(200, [needs], read(RemovalOut, driver_removal.consequences(driver), request))
    operation = driver_removal.remove(
        request.principal, name, plan_token=payload.plan_token, reason=payload.reason
    )
    return accepted(operation, needs)
