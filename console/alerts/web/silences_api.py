"""REST API of silences."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from django.db import transaction
from django.http import HttpResponse
from ninja import Field, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.alerts.models import Silence
from console.alerts.state import silences
from console.alerts.web.api import Number
from console.api.etags import etag, matched, tagged
from console.api.fields import NO_NUL, IfMatch, Input, Moment
from console.api.idempotency import Answer, idempotent
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import SlugOf, read
from console.orgs.models import SLUG
from console.orgs.services import get_org

router = Router(tags=["alerts"])

MatcherText = Annotated[str, Field(max_length=200, pattern=NO_NUL, examples=["node=ax-7"])]
OrgSlug = Annotated[str, Field(pattern=SLUG, max_length=48)]


class SilenceOut(Schema):
    id: int
    state: Literal["pending", "active", "expired"]
    org: SlugOf | None
    matchers: list[str]
    starts_at: datetime
    ends_at: datetime
    author: str
    reason: str
    version: int = Field(description="Also the ETag.")


class SilenceIn(Input):
    org: OrgSlug | None = Field(None, description="Only alerts of this org; null for all.")
    matchers: list[MatcherText] = Field(min_length=1, max_length=8, description="All must match.")
    starts_at: Moment | None = Field(None, description="Default: now.")
    ends_at: Moment = Field(description="At most 90 days after it starts.")
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=NO_NUL)]


@listing(router, "/silences", SilenceOut, by="-pk")
def list_silences(request: SignedInRequest) -> Rows:
    """List silences."""
    return silences.visible_silences(request.principal)


@router.post("/silences", response=answers(SilenceOut, 404, 409, status=201))
@idempotent
def create_silence(request: SignedInRequest, payload: SilenceIn) -> Answer:
    """Create a silence."""
    silence = silences.create_silence(
        request.principal,
        org=get_org(request.principal, payload.org) if payload.org else None,
        matchers=payload.matchers,
        starts_at=payload.starts_at,
        ends_at=payload.ends_at,
        reason=payload.reason,
    )
    headers = {"Location": f"/api/v1/silences/{silence.pk}", "ETag": etag(silence.version)}
    needs = [Authority(silence.org_id, Role.ON_CALL)]
    return Answer(201, needs, read(SilenceOut, silence, request), headers)


@router.get("/silences/{silence_id}", response=answers(SilenceOut, 404))
def get_silence(request: SignedInRequest, response: HttpResponse, silence_id: Number) -> Silence:
    """Get a silence."""
    return tagged(response, silences.get_silence(request.principal, silence_id))


@router.delete("/silences/{silence_id}", response=answers(SilenceOut, 404, 412, 428))
def end_silence(request: SignedInRequest, silence_id: Number, if_match: IfMatch) -> Silence:
    """End a silence now.

    It stays on record.
    """
    with transaction.atomic():
        silence = matched(silences.for_change(request.principal, silence_id), if_match)
        return silences.end_silence(request.principal, silence)
