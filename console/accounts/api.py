"""Oneself and one's tokens over REST."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal

from django.utils import timezone
from ninja import Field, Path, Query, Schema, Status

from console.accounts import services, tokens
from console.accounts.browser import SignedInRequest
from console.accounts.models import NAME
from console.accounts.names import USERNAME_MAX
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.api.fields import Input, Line, Moment
from console.api.idempotency import Answer, with_optional_key
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import PrefixOf, SlugOf, UsernameOf, read
from console.orgs.models import SLUG, SLUG_MAX, Org
from console.orgs.services import get_org, visible_orgs

router = Router(tags=["account"])

UserName = Annotated[str, Path(pattern=NAME, max_length=USERNAME_MAX)]
TokenId = Annotated[str, Path(pattern=r"^[0-9a-z]{12}$", description="`public_id` of the token.")]


class OrgRoleOut(Schema):
    org: str
    role: str


class MeOut(Schema):
    username: str
    full_name: str
    means: str = Field(description="How you authenticated: browser, token or jwt.")
    read_only: bool
    platform_role: str | None
    orgs: list[OrgRoleOut] = Field(description="Your role in each org by membership.")


class TokenOut(Schema):
    public_id: str
    name: str
    user: UsernameOf = Field(description="The user that owns it.")
    prefix: str
    read_only: bool
    org: SlugOf | None
    state: str
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None
    made_by: PrefixOf | None = Field(
        description="The prefix of the token that created it; revoking that one also revokes this one."
    )


class TokenIn(Input):
    name: Line
    read_only: bool = True
    org: str | None = Field(None, pattern=SLUG, max_length=48, description="Restrict it to this org.")
    days: int = Field(90, ge=1, le=tokens.LIFETIME_DAYS_MAX, description="Days until it expires.")
    expires_at: Moment | None = Field(
        None,
        description="Instead of `days`. A token or JWT can't create one that outlives it.",
    )


class TokenMade(TokenOut):
    token: str = Field(description="The token itself; shown only once.")


class RevokedOut(Schema):
    tokens: int = Field(description="API tokens revoked.")


@router.get("/me", response=answers(MeOut))
def me(request: SignedInRequest) -> MeOut:
    """The current user."""
    principal = request.principal
    user = principal.user
    slugs: dict[int, str] = dict(
        visible_orgs(principal).filter(pk__in=principal.memberships).values_list("pk", "slug")
    )
    held = [
        OrgRoleOut(org=slug, role=principal.memberships[org_id].label) for org_id, slug in slugs.items()
    ]
    return MeOut(
        username=user.username if user else "system",
        full_name=user.full_name if user else "",
        means=principal.means,
        read_only=principal.read_only,
        platform_role=principal.platform_role.label if principal.platform_role else None,
        orgs=sorted(held, key=lambda item: item.org),
    )


@router.delete("/users/{username}/credentials", response=answers(RevokedOut, 404))
def revoke_credentials(request: SignedInRequest, username: UserName) -> RevokedOut:
    """Revoke all browser sessions, tokens and JWTs of a user.

    For platform admins. JWTs that were issued before this moment are no longer accepted.
    """
    user = services.get_user(request.principal, username)
    return RevokedOut(tokens=services.revoke_credentials(request.principal, user))


@listing(router, "/tokens", TokenOut, by="-pk")
def list_tokens(
    request: SignedInRequest,
    whose: Annotated[
        Literal["mine", "administered"],
        Query(description="`administered`: tokens that you may revoke as an admin."),
    ] = "mine",
    user: Annotated[str, Query(max_length=USERNAME_MAX, pattern=r"^[a-z0-9._-]*$")] = "",
    org: Annotated[str, Query(max_length=SLUG_MAX, pattern=r"^[a-z0-9-]*$")] = "",
) -> Rows:
    """List tokens."""
    listed = tokens.own_tokens if whose == "mine" else tokens.administered_tokens
    return tokens.filtered(listed(request.principal), user=user, org=org)


@router.post("/tokens", response=answers(TokenMade, 404, 409, status=201))
@with_optional_key
def create_token(request: SignedInRequest, payload: TokenIn) -> Answer:
    """Create a token; it is shown once, and again to a retry with the same Idempotency-Key."""
    org: Org | None = get_org(request.principal, payload.org) if payload.org else None
    token, text = tokens.issue(
        request.principal,
        name=payload.name,
        read_only=payload.read_only,
        org=org,
        expires_at=payload.expires_at or timezone.now() + timedelta(days=payload.days),
    )
    token.token = text
    needs = [Authority(org.pk, Role.VIEWER)] if org else []
    return Answer(201, needs, read(TokenMade, token, request), is_own=True, has_secret=True)


@router.delete("/tokens/{public_id}", response=answers(None, 404, status=204))
def revoke_token(request: SignedInRequest, public_id: TokenId) -> Status[None]:
    """Revoke a token.

    One of yours, or of those that you administer. Tokens that it has made are revoked with it.
    """
    tokens.revoke(request.principal, public_id)
    return Status(204, None)
