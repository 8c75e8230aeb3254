"""Orgs and members over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Field, Path, Router, Schema, Status

from console.accounts.browser import requester
from console.accounts.models import NAME
from console.accounts.principal import Authority
from console.accounts.roles import IN_AN_ORG, Role
from console.api.etags import IfMatch, check_match, etag
from console.api.fields import Input, Line, Reason
from console.api.idempotency import Answer, ValidateOnly, with_dry_run
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import ApiError, documented
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
    username: str
    role: OrgRole


class MemberIn(Input):
    role: OrgRole
    reason: Reason = ""


def show_org(org: Org) -> OrgOut:
    return OrgOut(slug=org.slug, name=org.name, version=org.version, created_at=org.created_at)


def show_member(membership: Membership) -> MemberOut:
    role: Any = Role(membership.role).label
    return MemberOut(username=membership.user.username, role=role)


@router.get("/orgs", response={200: Page[OrgOut], **documented()}, summary="List orgs")
def list_orgs(
    request: HttpRequest, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    orgs = services.visible_orgs(requester(request))
    return paginate(orgs, "slug", cursor, limit, show_org)


@router.post("/orgs", response={201: OrgOut, **documented(409)}, summary="Create an org")
@with_dry_run
def create_org(request: HttpRequest, payload: OrgIn) -> Answer:
    principal = requester(request)
    org = services.create_org(principal, slug=payload.slug, name=payload.name, reason=payload.reason)
    headers = {"Location": f"/api/v1/orgs/{org.slug}", "ETag": etag(org.version)}
    return Answer(201, [Authority(None, Role.PLATFORM_ADMIN)], show_org(org), headers)


@router.get("/orgs/{slug}", response={200: OrgOut, **documented(404)}, summary="Get an org")
def get_org(request: HttpRequest, response: HttpResponse, slug: Slug) -> OrgOut:
    org = services.get_org(requester(request), slug)
    response["ETag"] = etag(org.version)
    return show_org(org)


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
) -> OrgOut:
    principal = requester(request)
    with transaction.atomic():
        org = services.for_change(principal, slug)
        check_match(if_match, org.version)
        org = services.update_org(principal, org, name=payload.name, reason=payload.reason)
        transaction.set_rollback(validate_only)
    response["ETag"] = etag(org.version)
    return show_org(org)


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


@router.get(
    "/orgs/{slug}/members", response={200: Page[MemberOut], **documented(404)}, summary="List members"
)
def list_members(
    request: HttpRequest, slug: Slug, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    org = services.get_org(requester(request), slug)
    return paginate(services.members(org), "pk", cursor, limit, show_member)


@router.put(
    "/orgs/{slug}/members/{username}",
    response={200: MemberOut, **documented(404)},
    summary="Add a member or change their role",
)
def set_member(request: HttpRequest, slug: Slug, username: Username, payload: MemberIn) -> MemberOut:
    principal = requester(request)
    role = next(role for role in IN_AN_ORG if role.label == payload.role)
    with transaction.atomic():
        org = services.for_change(principal, slug)
        try:
            membership = services.set_member(principal, org, username, role, reason=payload.reason)
        except services.NoSuchUser as error:
            raise Http404(str(error)) from None
    return show_member(membership)


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
