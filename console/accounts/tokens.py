"""Personal API tokens: `tgr_…` may read, `tgw_…` may also write.

A token is `<kind>_<public id>_<secret>`. The kind and the public id may be shown and logged; of the
secret only a SHA-256 is kept, which is enough for 32 random bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import replace
from datetime import datetime, timedelta

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts import credentials
from console.accounts.models import ApiToken, User
from console.accounts.principal import Means, Principal, Refused
from console.accounts.roles import Role
from console.accounts.services import principal_for, roles_of
from console.orgs.models import Membership, Org

TOKEN = re.compile(r"tg([rw])_([0-9a-z]{12})_([A-Za-z0-9_-]{43})")
PUBLIC_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
ACTIVE_TOKENS_MAX = 100
LIFETIME_DAYS_MAX = 366
LAST_USED_STEP = timedelta(minutes=1)  # one write a minute at most, however busy the token is


def own_tokens(principal: Principal) -> QuerySet[ApiToken]:
    """One's own tokens. A token that is confined to an org sees only itself."""
    tokens = ApiToken.objects.filter(user=principal.user_id).select_related("org", "user", "made_by")
    if principal.token is not None and principal.token.org_id is not None:
        return tokens.filter(pk=principal.token.pk)
    return tokens


def administered_tokens(principal: Principal) -> QuerySet[ApiToken]:
    """Tokens of others that they may list and revoke.

    For platform admins all. For admins of orgs those that are confined to one, and those of people who
    can do nothing outside of these orgs: what is used elsewhere is none of their business.
    """
    tokens = ApiToken.objects.select_related("org", "user", "made_by")
    if principal.on_platform(Role.PLATFORM_ADMIN):
        return tokens
    orgs = principal.orgs_where(Role.ORG_ADMIN)
    if principal.token is not None and principal.token.org_id is not None:
        if principal.holds(Role.ORG_ADMIN, principal.token.org_id):
            return tokens.filter(org=principal.token.org_id)
        return tokens.none()
    own = User.objects.filter(platform_role=None, memberships__org__in=orgs).exclude(
        memberships__in=Membership.objects.exclude(org__in=orgs)
    )
    return tokens.filter(Q(org__in=orgs) | Q(org=None, user__in=own))


def filtered(tokens: QuerySet[ApiToken], *, user: str = "", org: str = "") -> QuerySet[ApiToken]:
    """The same for the page and the API."""
    if user:
        tokens = tokens.filter(user__username=user)
    return tokens.filter(org__slug=org) if org else tokens


def administers(principal: Principal) -> bool:
    """Whether there can be tokens of others that they may revoke."""
    return bool(principal.orgs_where(Role.ORG_ADMIN)) or principal.on_platform(Role.PLATFORM_ADMIN)


@transaction.atomic
def issue(
    principal: Principal, *, name: str, read_only: bool, org: Org | None, expires_at: datetime
) -> tuple[ApiToken, str]:
    """Create a token for oneself; its text is returned once and never again.

    A credential makes none that may do more, or lasts longer, than itself: neither a token nor a JWT
    does. A browser's session makes them for LIFETIME_DAYS_MAX at most. Raises ValidationError for an
    end that is past or too far away.
    """
    principal.check_may_change()
    user = credentials.check_still_good(principal)  # locked, so that roles and the count below hold
    principal = replace(principal, memberships=roles_of(user))
    if org is not None and principal.role_in(org.pk) is None:
        raise Http404("There is no such org.")
    confined = principal.token.org_id if principal.token is not None else None
    if confined is not None and (org is None or org.pk != confined):
        raise Refused("This token is for one org, and so must be those it makes.")
    if principal.ends_at is not None and expires_at > principal.ends_at:
        what = "token" if principal.token is not None else "JWT"
        raise Refused(f"A {what} can't make a token that outlives it.")
    now = timezone.now()
    if not now < expires_at <= now + timedelta(days=LIFETIME_DAYS_MAX, minutes=1):
        raise ValidationError({"expires_at": [f"Within the next {LIFETIME_DAYS_MAX} days."]})
    if credentials.active_tokens(user).count() >= ACTIVE_TOKENS_MAX:
        raise Refused(f"You have {ACTIVE_TOKENS_MAX} active tokens. Revoke some first.")
    public_id = "".join(secrets.choice(PUBLIC_ID_ALPHABET) for _ in range(12))
    secret = secrets.token_urlsafe(32)
    token = ApiToken(
        user=user,
        name=name,
        public_id=public_id,
        secret_sha256=_digest(secret),
        read_only=read_only,
        org=org,
        expires_at=expires_at,
        made_by=principal.token,
    )
    token.full_clean(exclude=["secret_sha256", "last_used_at", "revoked_at", "made_by"])
    token.save()
    credentials.record_token(principal, "token.create", token)
    return token, f"{token.prefix}_{secret}"


@transaction.atomic
def revoke(principal: Principal, public_id: str) -> ApiToken:
    """Create a token useless from now on, with those that it made. Doing it again changes nothing.

    One's own, or one that they administer. Raises Http404 for any other.
    """
    principal.check_may_change()
    theirs = ApiToken.objects.filter(
        Q(pk__in=own_tokens(principal).values("pk"))
        | Q(pk__in=administered_tokens(principal).values("pk"))
    )
    token = theirs.select_related("user").filter(public_id=public_id).first()
    if token is None:
        raise Http404("There is no such token, or it is not yours to revoke.")
    User.objects.select_for_update(no_key=True).get(pk=token.user_id)  # nobody makes one of it meanwhile
    credentials.revoke(principal, ApiToken.objects.filter(pk=token.pk))
    token.refresh_from_db(fields=["revoked_at"])
    return token


def authenticate(text: str) -> Principal | None:
    """The principal of a token's text; None where it is malformed, unknown, expired or revoked."""
    match = TOKEN.fullmatch(text)
    if match is None:
        return None
    kind, public_id, secret = match.groups()
    try:
        token = ApiToken.objects.select_related("user").get(public_id=public_id)
    except ApiToken.DoesNotExist:
        token = None
    known = bytes(token.secret_sha256) if token else bytes(32)
    if not hmac.compare_digest(known, _digest(secret)) or token is None:
        return None
    if token.state != "active" or not token.user.is_active or token.read_only != (kind == "r"):
        return None
    now = timezone.now()
    if token.last_used_at is None or token.last_used_at < now - LAST_USED_STEP:
        unused = Q(last_used_at=None) | Q(last_used_at__lt=now - LAST_USED_STEP)
        ApiToken.objects.filter(unused, pk=token.pk).update(last_used_at=now)
    return principal_for(token.user, Means.TOKEN, token)


def sorted_for_display(tokens: QuerySet[ApiToken]) -> QuerySet[ApiToken]:
    """Those that still work first, the last used first among them."""
    return tokens.order_by(
        F("revoked_at").asc(nulls_first=True), F("last_used_at").desc(nulls_last=True), "-id"
    )


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
