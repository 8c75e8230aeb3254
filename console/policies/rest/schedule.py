"""Policies for later over REST."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from ninja import Field, Path, Status

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Moment
from console.api.idempotency import Answer, with_dry_run
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import read
from console.orgs.api import Slug
from console.orgs.services import changing, for_change, get_org
from console.policies import schedule
from console.policies.models import ScheduledPolicy
from console.policies.rest.fields import PolicyField
from console.policies.rest.policies import PoliciesIn, ReadsDocument, Why

router = Router(tags=["policies"])

Id = Annotated[int, Path(ge=1, le=2**63 - 1)]


class ScheduleIn(PoliciesIn):
    starts_at: Moment
    lasts_seconds: int | None = Field(
        None,
        ge=1,
        le=366 * 86_400,
        description="Then the previous policy returns; null: permanent.",
    )
    reason: Why


class ScheduledOut(ReadsDocument):
    id: int
    policy: PolicyField | None
    models: dict[str, PolicyField]
    in_words: str
    starts_at: datetime
    ends_at: datetime | None
    state: str
    note: str
    author: str = Field(validation_alias="author_name")
    reason: str


@listing(router, "/orgs/{slug}/policy/scheduled", ScheduledOut, 404, by="-pk")
def list_scheduled(request: SignedInRequest, slug: Slug) -> Rows:
    """List scheduled policies."""
    org = get_org(request.principal, slug)
    return ScheduledPolicy.objects.select_related("org").filter(org=org)


@router.post("/orgs/{slug}/policy/scheduled", response=answers(ScheduledOut, 404, 409, status=201))
@with_dry_run
def schedule_policy(request: SignedInRequest, slug: Slug, payload: ScheduleIn) -> Answer:
    """Schedule a policy."""
    org, lasts = for_change(request.principal, slug), payload.lasts_seconds
    planned = schedule.schedule(
        request.principal,
        org,
        payload.wanted(),
        starts_at=payload.starts_at,
        lasts=None if lasts is None else timedelta(seconds=lasts),
        reason=payload.reason,
    )
    return Answer(201, [Authority(org.pk, Role.ORG_ADMIN)], read(ScheduledOut, planned, request))


@router.delete("/orgs/{slug}/policy/scheduled/{number}", response=answers(None, 404, status=204))
def unschedule_policy(request: SignedInRequest, slug: Slug, number: Id) -> Status[None]:
    """Cancel a scheduled policy; an active one ends now."""
    with changing(request.principal, slug) as org:
        schedule.take_back(request.principal, org, number)
    return Status(204, None)
