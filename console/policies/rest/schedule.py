"""Policies for later over REST."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from django.db import transaction
from django.http import HttpRequest
from ninja import Field, Path, Router, Schema, Status

from console.accounts.browser import requester
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Moment
from console.api.idempotency import Answer, with_dry_run
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.orgs.api import Slug
from console.orgs.models import SLUG
from console.orgs.services import for_change, get_org
from console.policies import documents, schedule, sentences
from console.policies.models import ScheduledPolicy
from console.policies.rest.fields import PolicyField
from console.policies.rest.policies import PoliciesIn, Why

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


class ScheduledOut(Schema):
    id: int
    policy: PolicyField | None
    models: dict[str, PolicyField]
    in_words: str
    starts_at: datetime
    ends_at: datetime | None
    state: str
    note: str
    author: str
    reason: str


def show_scheduled(planned: ScheduledPolicy) -> ScheduledOut:
    said = documents.read_org(planned.document)
    return ScheduledOut(
        id=planned.pk,
        policy=said.policy if said else None,
        models=said.models if said else {},
        in_words=sentences.sentence(said.policy) if said else "It follows the cluster's default.",
        starts_at=planned.starts_at,
        ends_at=planned.ends_at,
        state=planned.state,
        note=planned.note,
        author=planned.author_name,
        reason=planned.reason,
    )


@router.get(
    "/orgs/{slug}/policy/scheduled",
    response={200: Page[ScheduledOut], **documented(404)},
    summary="List scheduled policies",
)
def list_scheduled(
    request: HttpRequest, slug: Slug, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    org = get_org(requester(request), slug)
    rows = ScheduledPolicy.objects.select_related("org").filter(org=org)
    return paginate(rows, "-pk", cursor, limit, show_scheduled)


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
    return Answer(201, [Authority(org.pk, Role.ORG_ADMIN)], show_scheduled(planned))


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
