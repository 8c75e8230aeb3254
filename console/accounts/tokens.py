"""Personal API tokens: `tgr_…` may read, `tgw_…` may also write.

A token is `<kind>_<public id>_<secret>`. The kind and the public id may be shown and logged; of the
secret only a SHA-256 is kept, which is enough for 32 random bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts.models import ApiToken, User
from console.accounts.principal import Means, Principal, Refused
from console.accounts.services import principal_for
from console.audit.services import record
from console.orgs.models import Org

TOKEN = re.compile(r"tg([rw])_([0-9a-z]{12})_([A-Za-z0-9_-]{43})")
PUBLIC_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
ACTIVE_TOKENS_MAX = 100
LIFETIME_DAYS_MAX = 366
LAST_USED_STEP = timedelta(minutes=1)  # one write a minute at most, however busy the token is


def own_tokens(principal: Principal) -> QuerySet[ApiToken]:
    """One's own tokens. A token that is confined to an org sees only itself."""
    tokens = ApiToken.objects.filter(user=principal.user_id).select_related("org")
    if principal.token is not None and principal.token.org_id is not None:
        return tokens.filter(pk=principal.token.pk)
    return tokens


@transaction.atomic
def issue(
    principal: Principal, *, name: str, read_only: bool, org: Org | None, expires_at: datetime
) -> tuple[ApiToken, str]:
    """Make a token for oneself; its text is returned once and never again.

    A token can't make another that may do more, or live longer, than itself.
    """
    principal.check_may_change()
    user = principal.user
    if user is None:
        raise Refused("Only a user can have tokens.")
    if org is not None and principal.role_in(org.pk) is None:
        raise Http404("There is no such org.")
    if principal.token is not None:
        if principal.token.org_id is not None and (org is None or org.pk != principal.token.org_id):
            raise Refused("This token is for one org, and so must be those it makes.")
        if expires_at > principal.token.expires_at:
            raise Refused("A token can't make one that outlives it.")
    User.objects.select_for_update().get(pk=user.pk)  # so that the count below holds
    active = ApiToken.objects.filter(user=user, revoked_at=None, expires_at__gt=timezone.now())
    if active.count() >= ACTIVE_TOKENS_MAX:
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
    )
    token.full_clean(exclude=["secret_sha256", "last_used_at", "revoked_at"])
    token.save()
    _record(principal, "token.create", token)
    return token, f"{token.prefix}_{secret}"


@transaction.atomic
def revoke(principal: Principal, public_id: str) -> ApiToken:
    """Make one's own token useless from now on. Doing it again changes nothing."""
    principal.check_may_change()
    token = own_tokens(principal).select_for_update(of=("self",)).filter(public_id=public_id).first()
    if token is None:
        raise Http404("You have no such token.")
    if token.revoked_at is None:
        token.revoked_at = timezone.now()
        token.save(update_fields=["revoked_at"])
        _record(principal, "token.revoke", token)
    return token


def authenticate(text: str) -> Principal | None:
    """The principal of a token's text; None where it is malformed, unknown, expired or revoked."""
    match = TOKEN.fullmatch(text)
    if match is None:
        return None
    kind, public_id, secret = match.groups()
    token = ApiToken.objects.select_related("user").filter(public_id=public_id).first()
    known = bytes(token.secret_sha256) if token else bytes(32)
    if not hmac.compare_digest(known, _digest(secret)) or token is None:
        return None
    if token.state != "active" or not token.user.is_active or token.read_only != (kind == "r"):
        return None
    now = timezone.now()
    unused = Q(last_used_at=None) | Q(last_used_at__lt=now - LAST_USED_STEP)
    if token.last_used_at is None or token.last_used_at < now - LAST_USED_STEP:
        ApiToken.objects.filter(unused, pk=token.pk).update(last_used_at=now)
    return principal_for(token.user, Means.TOKEN, token)


def sorted_for_display(tokens: QuerySet[ApiToken]) -> QuerySet[ApiToken]:
    """Those that still work first, the last used first among them."""
    return tokens.order_by(
        F("revoked_at").asc(nulls_first=True), F("last_used_at").desc(nulls_last=True), "-id"
    )


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _record(principal: Principal, action: str, token: ApiToken) -> None:
    fact = {
        "name": token.name,
        "prefix": token.prefix,
        "scope": "read" if token.read_only else "read and write",
        "org": token.org.slug if token.org else None,
        "expires_at": token.expires_at,
    }
    created = action == "token.create"
    record(
        principal,
        action,
        object_type="token",
        object_id=token.public_id,
        object_name=token.name,
        org_id=token.org_id,
        before=None if created else fact,
        after=fact if created else None,
    )
