"""Limits of an org over REST."""

from __future__ import annotations

from typing import Annotated

import msgspec
from django.http import HttpResponse
from ninja import Field, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.etags import check_match, etag
from console.api.fields import IfMatch, Input, Reason
from console.api.idempotency import Answer, with_dry_run
from console.api.routes import Router, answers
from console.api.shown import read
from console.control.services import Reach
from console.orgs.api import Slug
from console.orgs.services import for_change, get_org
from console.routing import limits, rollout
from console.routing.limits import DEFAULTS, ActiveLimits
from console.routing.models import COUNT_MAX
from inference_brain.desired import PER_MINUTE_MAX, SECONDS_MAX, Limits

router = Router(tags=["routing"])

PerMinute = Annotated[int, Field(ge=1, le=PER_MINUTE_MAX)]


class LimitFields(Schema):
    requests_per_minute: PerMinute | None = Field(None, description="Null: no limit.")
    tokens_per_minute: PerMinute | None = Field(
        None, description="Of prompts and answers; cached tokens count. Null: no limit."
    )
    concurrent: Annotated[int, Field(ge=1, le=COUNT_MAX)] | None = Field(
        None, description="Requests in progress over all brains. Null: no limit."
    )
    queued: Annotated[int, Field(ge=0, le=COUNT_MAX)] = Field(
        DEFAULTS.queued, description="Requests that may wait; further ones get 429."
    )
    weight: Annotated[int, Field(ge=1, le=COUNT_MAX)] = Field(
        DEFAULTS.weight, description="Share of replicas that other orgs want as well."
    )
    priority: Annotated[int, Field(ge=0, le=100)] = Field(
        DEFAULTS.priority, description="The highest that its requests may name."
    )
    wait_seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX)] = Field(
        DEFAULTS.wait_seconds, description="In a queue, at most; then 503."
    )


class LimitsPut(Input, LimitFields):
    reason: Reason = ""

    def limits(self) -> Limits:
        return Limits(**self.model_dump(exclude={"reason"}))


class LimitsReachOut(Schema):
    """How far the limits have come. `seconds` is what it took until the last brain had them."""

    brains: int
    has_it: int
    seconds: float | None


class LimitsOut(LimitFields):
    org: str
    version: int = Field(description="Incremented with each change; the ETag. 0: the defaults.")
    applied: LimitsReachOut


def show(held: ActiveLimits, reach: Reach) -> dict[str, object]:
    applied = {"brains": len(reach.standings), "has_it": reach.has_it, "seconds": reach.seconds}
    said = msgspec.structs.asdict(held.limits)
    return {**said, "org": held.org.slug, "version": held.version, "applied": applied}


@router.get("/orgs/{slug}/limits", response=answers(LimitsOut, 404))
def get_limits(request: SignedInRequest, response: HttpResponse, slug: Slug) -> dict[str, object]:
    """Get the limits of an org for requests to brains."""
    held = limits.active_limits(get_org(request.principal, slug))
    response["ETag"] = etag(held.version)
    return show(held, rollout.reach_of_limits(held.org))


@router.put("/orgs/{slug}/limits", response=answers(LimitsOut, 404, 409, 412, 428))
@with_dry_run
def put_limits(request: SignedInRequest, slug: Slug, payload: LimitsPut, if_match: IfMatch) -> Answer:
    """Set the limits of an org.

    Omitted fields have their defaults. Brains apply them within seconds; `applied` says how many have.
    """
    org = for_change(request.principal, slug, Role.VIEWER)
    limits.check_may_set(request.principal)
    check_match(if_match, limits.active_limits(org).version)
    held = limits.set_limits(request.principal, org, payload.limits(), reason=payload.reason)
    body = read(LimitsOut, show(held, rollout.reach_of_limits(org)), request)
    return Answer(200, [Authority(None, Role.PLATFORM_ADMIN)], body, {"ETag": etag(held.version)})
