"""The end of credentials: of API tokens, browser sessions and JWTs.

A credential never makes one that may do more or lasts longer. Revoking a token revokes what it made.
"""

from __future__ import annotations

from typing import Any, Final

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from console.accounts.models import ApiToken, User
from console.accounts.names import ACCOUNT
from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.audit.services import Subject, record
from telemetry.hints import hint

_REVOKED: Final = "credentials.revoked"


def announce(user: User) -> None:
    """Have live connections of this user checked as soon as the transaction is committed."""
    hint([f"{ACCOUNT}{user.pk}"], _REVOKED)


def active_tokens(user: User) -> QuerySet[ApiToken]:
    return ApiToken.objects.filter(user=user, revoked_at=None, expires_at__gt=timezone.now())


@transaction.atomic
def revoke(principal: Principal, tokens: QuerySet[ApiToken]) -> int:
    """Revoke these tokens and those that they made, each with its entry in the trail.

    Whoever calls has checked that the principal may. Returns how many that were.
    """
    now, found, made = timezone.now(), 0, tokens
    while True:
        rows = list(made.filter(revoked_at=None).select_related("user", "org").order_by("pk"))
        for token in rows:
            token.revoked_at = now
            token.save(update_fields=["revoked_at"])
            record_token(principal, "token.revoke", token)
        for user in {token.user for token in rows}:
            announce(user)
        if not rows:
            return found
        found += len(rows)
        made = ApiToken.objects.filter(made_by__in=[token.pk for token in rows])


@transaction.atomic
def revoke_all(principal: Principal, user: User) -> int:
    """Revoke every token, browser session and JWT of a user whose row the caller has locked."""
    user.credentials_since = timezone.now()
    user.save(update_fields=["credentials_since"])
    announce(user)
    return revoke(principal, ApiToken.objects.filter(user=user))


@transaction.atomic
def revoke_after_fall(
    principal: Principal,
    user: User,
    before: Role | None,
    after: Role | None,
    org_id: int | None = None,
) -> int:
    """Revoke the tokens that relied on a role that has become less: in an org, or on the platform.

    What a token may do follows its owner's roles at each request, so this is about later: a token shall
    not come to life again with a role that is given back. A token for everything its owner may do is not
    revoked by a membership: admins of one org would revoke what is used in another.
    """
    if (before or 0) <= (after or 0):
        return 0
    held = dict(user.memberships.values_list("org_id", "role"))
    platform = user.platform_role or 0
    fallen = [
        token.pk
        for token in active_tokens(user)
        if (token.org_id == org_id or org_id is None)
        and _had(token, org_id, before, held, platform) > _had(token, org_id, after, held, platform)
    ]
    announce(user)
    return revoke(principal, ApiToken.objects.filter(pk__in=fallen))


def _had(
    token: ApiToken, org_id: int | None, role: Role | None, held: dict[int, int], platform: int
) -> int:
    """The role that a token had, while its owner held this one in the org or on the platform."""
    if org_id is not None:
        return max(role or 0, platform)
    return max(role or 0, held.get(token.org_id, 0) if token.org_id else 0)


def check_still_good(principal: Principal) -> User:
    """The user of a principal, locked. Raises Refused where their credential was revoked meanwhile."""
    if principal.user is None:
        raise Refused("Only a user can have tokens.")
    user = User.objects.select_for_update(no_key=True).get(pk=principal.user.pk)
    since, token = user.credentials_since, principal.token
    is_revoked = (
        not user.is_active
        or since != principal.user.credentials_since
        or user.password != principal.user.password
        or (token is not None and not active_tokens(user).filter(pk=token.pk).exists())
    )
    if is_revoked:
        raise Refused("This credential was revoked meanwhile.")
    return user


def record_token(principal: Principal, action: str, token: ApiToken) -> None:
    fact: dict[str, Any] = {
        "name": token.name,
        "prefix": token.prefix,
        "user": token.user.username,
        "scope": "read" if token.read_only else "read and write",
        "org": token.org.slug if token.org else None,
        "expires_at": token.expires_at,
    }
    created = action == "token.create"
    record(
        principal,
        action,
        Subject("token", token.public_id, token.name, token.org_id),
        before=None if created else fact,
        after=fact if created else None,
    )
