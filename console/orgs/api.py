"""Orgs and members over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from django.db import transaction
from django.http import HttpResponse
from ninja import Field, Path, Schema, Status

from console.accounts.browser import SignedInRequest
from console.accounts.models import NAME
from console.accounts.principal import Authority
from console.accounts.roles import IN_AN_ORG, Role
from console.api.etags import check_match, etag, matched, tagged
from console.api.fields import IfMatch, Input, Line, Reason
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import read
from console.orgs import services
from console.orgs.models import SLUG, Membership, Org

router = Router(tags=["orgs"])

Slug = Annotated[str, Path(pattern=SLUG, max_length=48, description="The org.")]
Username = Annotated[str, Path(pattern=NAME, max_length=63)]
OrgRole = Literal["viewer", "on-call", "org admin"]


class OrgOut(Schema):
    slug: str
    name: str
    version: int = Field(description="Incremented with each change; the ETag.")
    created_at: datetime


class OrgIn(Input):
    slug: Annotated[str, Field(pattern=SLUG, max_length=48, examples=["acme"])]
    name: Line
    reason: Reason = Field("", description="Recorded in the audit trail.")


class OrgPatch(Input):
    name: Line
    reason: Reason = ""


class MemberOut(Schema):
    username: str = Field(validation_alias="user.username")
    role: OrgRole = Field(validation_alias="get_role_display")


class MemberIn(Input):
    role: OrgRole
    reason: Reason = ""


@listing(router, "/orgs", OrgOut, by="slug")
def list_orgs(request: SignedInRequest) -> Rows:
    """List orgs."""
    return services.visible_orgs(request.principal)


@router.post("/orgs", response=answers(OrgOut, 409, status=201))
@with_dry_run
def create_org(request: SignedInRequest, payload: OrgIn) -> Answer:
    """Create an org."""
    principal = request.principal
    org = services.create_org(principal, slug=payload.slug, name=payload.name, reason=payload.reason)
    headers = {"Location": f"/api/v1/orgs/{org.slug}", "ETag": etag(org.version)}
    return Answer(201, [Authority(None, Role.PLATFORM_ADMIN)], read(OrgOut, org, request), headers)


@router.get("/orgs/{slug}", response=answers(OrgOut, 404))
def get_org(request: SignedInRequest, response: HttpResponse, slug: Slug) -> Org:
    """Get an org."""
    org = services.get_org(request.principal, slug)
    return tagged(response, org)


@router.patch("/orgs/{slug}", response=answers(OrgOut, 404, 412, 428))
def update_org(
    request: SignedInRequest,
    response: HttpResponse,
    slug: Slug,
    payload: OrgPatch,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Org:
    """Rename an org."""
    with services.changing(request.principal, slug) as org:
        check_match(if_match, org.version)
        org = services.update_org(request.principal, org, name=payload.name, reason=payload.reason)
        transaction.set_rollback(validate_only)
    return tagged(response, org)


@router.delete("/orgs/{slug}", response=answers(None, 404, 409, 412, 428, status=204))
@with_dry_run
def delete_org(request: SignedInRequest, slug: Slug, if_match: IfMatch) -> Answer:
    """Delete an org."""
    org = matched(services.for_change(request.principal, slug, Role.PLATFORM_ADMIN), if_match)
    services.delete_org(request.principal, org)
    return Answer(204, [Authority(None, Role.PLATFORM_ADMIN)])


@listing(router, "/orgs/{slug}/members", MemberOut, 404, by="pk")
def list_members(request: SignedInRequest, slug: Slug) -> Rows:
    """List members."""
    org = services.get_org(request.principal, slug)
    return services.members(org)


@router.put("/orgs/{slug}/members/{username}", response=answers(MemberOut, 404))
def set_member(
    request: SignedInRequest, slug: Slug, username: Username, payload: MemberIn
) -> Membership:
    """Add a member or change their role."""
    principal = request.principal
    role = next(role for role in IN_AN_ORG if role.label == payload.role)
    with services.changing(principal, slug) as org:
        return services.set_member(principal, org, username, role, reason=payload.reason)


@router.delete("/orgs/{slug}/members/{username}", response=answers(None, 404, status=204))
def remove_member(request: SignedInRequest, slug: Slug, username: Username) -> Status[None]:
    """Remove a member."""
    with services.changing(request.principal, slug) as org:
        services.remove_member(request.principal, org, username)
    return Status(204, None)
