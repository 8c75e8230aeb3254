"""Policies for later over REST."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from django.db import transaction
from django.http import HttpRequest
from ninja import Field, Path, Router, Status

from console.accounts.browser import requester
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Moment
from console.api.idempotency import Answer, with_dry_run
from console.api.pagination import Rows, listing
from console.api.problems import documented
from console.api.shown import read
from console.orgs.api import Slug
from console.orgs.models import SLUG
from console.orgs.services import for_change, get_org
from console.policies import schedule
from console.policies.models import ScheduledPolicy
from console.policies.rest.fields import PolicyField
from console.policies.rest.policies import PoliciesIn, ReadsDocument, Why

router = Router(tags=["policies"])

Id = Annotated[int, Path(ge=1, le=2**63 - 1)]
SlugIn = Annotated[str, Field(pattern=SLUG, max_length=48)]


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


@listing(
    router,
    "/orgs/{slug}/policy/scheduled",
    ScheduledOut,
    404,
    by="-pk",
    summary="List scheduled policies",
)
def list_scheduled(request: HttpRequest, slug: Slug) -> Rows:
    org = get_org(requester(request), slug)
    return ScheduledPolicy.objects.select_related("org").filter(org=org)


@router.post(
    "/orgs/{slug}/policy/scheduled",
    response={201: ScheduledOut, **documented(404, 409)},
    summary="Schedule a policy",
)
@with_dry_run
def schedule_policy(
    request: HttpRequest,
    slug: Slug,
    payload: ScheduleIn,
) -> Answer:
    principal = requester(request)
    org = for_change(principal, slug)
    planned = schedule.schedule(
        principal,
        org,
        payload.wanted(),
        starts_at=payload.starts_at,
        lasts=timedelta(seconds=payload.lasts_seconds) if payload.lasts_seconds else None,
        reason=payload.reason,
    )
    return Answer(201, [Authority(org.pk, Role.ORG_ADMIN)], read(ScheduledOut, planned, request))


@router.delete(
    "/orgs/{slug}/policy/scheduled/{number}",
    response={204: None, **documented(404)},
    summary="Cancel a scheduled policy; an active one ends now",
)
def unschedule_policy(request: HttpRequest, slug: Slug, number: Id) -> Status[None]:
    principal = requester(request)
    with transaction.atomic():
        schedule.take_back(principal, for_change(principal, slug), number)
    return Status(204, None)
