"""API keys of an org, over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from ninja import Field, Path, Schema, Status

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Input, Line, Reason
from console.api.idempotency import Answer, with_optional_key
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import read
from console.orgs.api import Slug
from console.orgs.services import changing, get_org
from console.policies import callers

router = Router(tags=["policies"])


class CallerOut(Schema):
    id: str = Field(validation_alias="public_id")
    name: str
    prefix: str
    created_by: str
    created_at: datetime


class CallerIn(Input):
    name: Line
    reason: Reason = ""


class NewCallerOut(CallerOut):
    token: str = Field(
        description="Shown only once. Clients of brains and engines send it as a bearer token."
    )


@listing(router, "/orgs/{slug}/callers", CallerOut, 404, by="pk")
def list_callers(request: SignedInRequest, slug: Slug) -> Rows:
    """List the API keys of an org."""
    org = get_org(request.principal, slug, Role.ORG_ADMIN)
    return callers.callers_of(org)


@router.post("/orgs/{slug}/callers", response=answers(NewCallerOut, 404, 409, status=201))
@with_optional_key
def add_caller(request: SignedInRequest, slug: Slug, payload: CallerIn) -> Answer:
    """Create an API key; it is shown once, and again to a retry with the same Idempotency-Key."""
    principal = request.principal
    with changing(principal, slug) as org:
        caller, token = callers.add_caller(principal, org, name=payload.name, reason=payload.reason)
    caller.token = token
    body = read(NewCallerOut, caller, request)
    return Answer(201, [Authority(org.pk, Role.ORG_ADMIN)], body, has_secret=True)


@router.delete("/orgs/{slug}/callers/{public_id}", response=answers(None, 404, status=204))
def remove_caller(
    request: SignedInRequest, slug: Slug, public_id: Annotated[str, Path(pattern="^[0-9a-f]{12}$")]
) -> Status[None]:
    """Remove an API key."""
    with changing(request.principal, slug) as org:
        callers.remove_caller(request.principal, org, public_id)
    return Status(204, None)
