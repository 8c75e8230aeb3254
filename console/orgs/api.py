"""Orgs and members over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Field, Path, Router, Schema, Status

from console.accounts.browser import requester
from console.accounts.models import NAME
from console.accounts.principal import Authority
from console.accounts.roles import IN_AN_ORG, Role
from console.api.etags import IfMatch, check_match, etag, tagged
from console.api.fields import Input, Line, Reason
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.pagination import Rows, listing
from console.api.problems import ApiError, documented
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


@listing(router, "/orgs", OrgOut, by="slug", summary="List orgs")
def list_orgs(request: HttpRequest) -> Rows:
    return services.visible_orgs(requester(request))


@router.post("/orgs", response={201: OrgOut, **documented(409)}, summary="Create an org")
@with_dry_run
def create_org(request: HttpRequest, payload: OrgIn) -> Answer:
    principal = requester(request)
    org = services.create_org(principal, slug=payload.slug, name=payload.name, reason=payload.reason)
    headers = {"Location": f"/api/v1/orgs/{org.slug}", "ETag": etag(org.version)}
    return Answer(201, [Authority(None, Role.PLATFORM_ADMIN)], read(OrgOut, org, request), headers)


@router.get("/orgs/{slug}", response={200: OrgOut, **documented(404)}, summary="Get an org")
def get_org(request: HttpRequest, response: HttpResponse, slug: Slug) -> Org:
    org = services.get_org(requester(request), slug)
    return tagged(response, org)


@router.patch(
    "/orgs/{slug}", response={200: OrgOut, **documented(404, 412, 428)}, summary="Rename an org"
)
def update_org(
    request: HttpRequest,
    response: HttpResponse,
    slug: Slug,
    payload: OrgPatch,
    if_match: IfMatch,
    validate_only: ValidateOnly = False,
) -> Org:
    principal = requester(request)
    with transaction.atomic():
        org = services.for_change(principal, slug)
        check_match(if_match, org.version)
        org = services.update_org(principal, org, name=payload.name, reason=payload.reason)
        transaction.set_rollback(validate_only)
    return tagged(response, org)


@router.delete(
    "/orgs/{slug}", response={204: None, **documented(404, 409, 412, 428)}, summary="Delete an org"
)
@with_dry_run
def delete_org(
    request: HttpRequest,
    slug: Slug,
    if_match: IfMatch,
) -> Answer:
    principal = requester(request)
    org = services.for_change(principal, slug, Role.PLATFORM_ADMIN)
    check_match(if_match, org.version)
    try:
        services.delete_org(principal, org)
    except services.StillUsed as error:
        raise ApiError("Conflict", str(error)) from None
    return Answer(204, [Authority(None, Role.PLATFORM_ADMIN)])


@listing(router, "/orgs/{slug}/members", MemberOut, 404, by="pk", summary="List members")
def list_members(request: HttpRequest, slug: Slug) -> Rows:
    org = services.get_org(requester(request), slug)
    return services.members(org)


@router.put(
    "/orgs/{slug}/members/{username}",
    response={200: MemberOut, **documented(404)},
    summary="Add a member or change their role",
)
def set_member(request: HttpRequest, slug: Slug, username: Username, payload: MemberIn) -> Membership:
    principal = requester(request)
    role = next(role for role in IN_AN_ORG if role.label == payload.role)
    with transaction.atomic():
        org = services.for_change(principal, slug)
        try:
            membership = services.set_member(principal, org, username, role, reason=payload.reason)
        except services.NoSuchUser as error:
            raise Http404(str(error)) from None
    return membership


@router.delete(
    "/orgs/{slug}/members/{username}",
    response={204: None, **documented(404)},
    summary="Remove a member",
)
def remove_member(request: HttpRequest, slug: Slug, username: Username) -> Status[None]:
    principal = requester(request)
    with transaction.atomic():
        org = services.for_change(principal, slug)
        services.remove_member(principal, org, username)
    return Status(204, None)
