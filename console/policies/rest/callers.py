"""Who may ask drivers in the name of an org, over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from django.db import transaction
from django.http import HttpRequest
from ninja import Field, Path, Router, Schema, Status

from console.accounts.browser import requester
from console.accounts.roles import Role
from console.api.fields import Input, Line, Reason
from console.api.pagination import Rows, listing
from console.api.problems import documented
from console.orgs.api import Slug
from console.orgs.services import for_change, get_org
from console.policies import callers
from console.policies.models import Caller

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
    token: str = Field(description="Shown only once. Engines send it to drivers as a bearer token.")


@listing(
    router, "/orgs/{slug}/callers", CallerOut, 404, by="pk", summary="List the engine tokens of an org"
)
def list_callers(request: HttpRequest, slug: Slug) -> Rows:
    org = get_org(requester(request), slug, Role.ORG_ADMIN)
    return callers.callers_of(org)


@router.post(
    "/orgs/{slug}/callers",
    response={201: NewCallerOut, **documented(404)},
    summary="Create an engine token; it is shown once",
)
def add_caller(request: HttpRequest, slug: Slug, payload: CallerIn) -> Status[Caller]:
    principal = requester(request)
    with transaction.atomic():
        org = for_change(principal, slug)
        caller, token = callers.add_caller(principal, org, name=payload.name, reason=payload.reason)
    caller.token = token
    return Status(201, caller)


@router.delete(
    "/orgs/{slug}/callers/{public_id}",
    response={204: None, **documented(404)},
    summary="Remove an engine token",
)
def remove_caller(
    request: HttpRequest, slug: Slug, public_id: Annotated[str, Path(pattern="^[0-9a-f]{12}$")]
) -> Status[None]:
    principal = requester(request)
    with transaction.atomic():
        org = for_change(principal, slug)
        callers.remove_caller(principal, org, public_id)
    return Status(204, None)
