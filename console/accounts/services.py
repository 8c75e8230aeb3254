"""Users: who there is, what they hold on the platform, and the principal they act as."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Any

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import QuerySet
from django.http import Http404

from console.accounts import credentials
from console.accounts.models import ApiToken, User
from console.accounts.principal import Means, Principal, Refused
from console.accounts.roles import Role
from console.audit.services import Subject, record

GENERATED_PASSWORD_BYTES = 15


def principal_for(
    user: User, means: Means, token: ApiToken | None = None, expires_at: datetime | None = None
) -> Principal:
    """The principal that `user` acts as. The caller has authenticated them and seen them active."""
    return Principal(
        user=user,
        means=means,
        memberships=roles_of(user),
        token=token,
        expires_at=expires_at,
    )


def roles_of(user: User) -> dict[int, Role]:
    """Their role in each org that they are a member of.

    Each request asks for them, which takes a sixth of the time without Django's query builder."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT org_id, role FROM orgs_membership WHERE user_id = %s", [user.pk])
        return {org_id: Role(role) for org_id, role in cursor.fetchall()}


def snapshot(user: User) -> dict[str, Any]:
    role = Role(user.platform_role).label if user.platform_role else None
    return {
        "username": user.username,
        "full_name": user.full_name,
        "email": user.email,
        "platform_role": role,
        "is_active": user.is_active,
    }


def list_users(principal: Principal) -> QuerySet[User]:
    principal.check_platform(Role.PLATFORM_ADMIN)
    return User.objects.all()


def get_user(principal: Principal, username: str) -> User:
    principal.check_platform(Role.PLATFORM_ADMIN)
    user = User.objects.filter(username=username).first()
    if user is None:
        raise Http404("There is no such user.")
    return user


def generate_password() -> str:
    return secrets.token_urlsafe(GENERATED_PASSWORD_BYTES)


@transaction.atomic
def create_user(
    principal: Principal,
    *,
    username: str,
    full_name: str = "",
    email: str = "",
    platform_role: Role | None = None,
    reason: str = "",
    must_change_password: bool = True,
) -> tuple[User, str]:
    """Add a user with a generated password, which is returned once and kept only as a hash."""
    principal.check_may_change(Role.PLATFORM_ADMIN)
    password = generate_password()
    user = User(
        username=username,
        full_name=full_name,
        email=email,
        platform_role=platform_role,
        must_change_password=must_change_password,
    )
    user.set_password(password)
    user.full_clean()
    user.save()
    record(principal, "user.create", _about(user), after=snapshot(user), reason=reason)
    return user, password


@transaction.atomic
def update_user(
    principal: Principal,
    user: User,
    *,
    full_name: str,
    email: str,
    platform_role: Role | None,
    is_active: bool,
    reason: str = "",
) -> User:
    """Change what they are called and may do. Somebody must remain who can administer the platform.

    Deactivation revokes all credentials, and a lower role on the platform the tokens that relied on it.
    Raises Refused where this would leave nobody, or where they would lock out themselves.
    """
    principal.check_may_change(Role.PLATFORM_ADMIN)
    # All admins are locked, in order, so that two of them can't remove one another at the same time.
    admins = list(
        User.objects.select_for_update(no_key=True)
        .filter(platform_role=Role.PLATFORM_ADMIN, is_active=True)
        .order_by("pk")
    )
    user = User.objects.select_for_update(no_key=True).get(pk=user.pk)
    stays_admin = is_active and platform_role == Role.PLATFORM_ADMIN
    if not stays_admin and [admin.pk for admin in admins] == [user.pk]:
        raise Refused(f"{user.username} is the last platform admin. Make somebody else one first.")
    before, role_before = snapshot(user), _role(user.platform_role)
    user.full_name, user.email = full_name, email
    user.platform_role, user.is_active = platform_role, is_active
    user.full_clean()
    user.save()
    after = snapshot(user)
    if after != before:
        record(principal, "user.update", _about(user), before=before, after=after, reason=reason)
    if before["is_active"] and not is_active:
        credentials.revoke_all(principal, user)
    else:
        credentials.revoke_after_fall(principal, user, role_before, platform_role)
    return user


@transaction.atomic
def reset_password(principal: Principal, user: User, reason: str = "") -> str:
    """Give a user a generated password, to be changed at the next log-in; it is returned once.

    Whoever has their password may have had it for long: all their other credentials are revoked.
    """
    principal.check_may_change(Role.PLATFORM_ADMIN)
    password = generate_password()
    user = User.objects.select_for_update(no_key=True).get(pk=user.pk)
    user.set_password(password)
    user.must_change_password = True
    user.save(update_fields=["password", "must_change_password"])
    record(principal, "user.reset_password", _about(user), reason=reason)
    credentials.revoke_all(principal, user)
    return password


@transaction.atomic
def revoke_credentials(principal: Principal, user: User, reason: str = "") -> int:
    """End every browser session, API token and JWT of a user. Returns how many tokens that were."""
    principal.check_may_change(Role.PLATFORM_ADMIN)
    user = User.objects.select_for_update(no_key=True).get(pk=user.pk)
    record(principal, "user.revoke_credentials", _about(user), reason=reason)
    return credentials.revoke_all(principal, user)


@transaction.atomic
def change_password(
    principal: Principal, new_password: str, *, revoke_credentials: bool = False
) -> None:
    """Change one's own password, which ends their other browser sessions.

    With `revoke_credentials` it revokes their API tokens and JWTs as well. Raises ValidationError where
    the password is too weak, or the one they have: somebody else may have generated that.
    """
    user = principal.user
    if user is None or principal.means is not Means.BROWSER:
        raise Refused("A password is changed by its owner, in the browser.")
    validate_password(new_password, user)
    if user.check_password(new_password):
        raise ValidationError("That is your current password.")
    user.set_password(new_password)
    user.must_change_password = False
    user.save(update_fields=["password", "must_change_password"])
    record(principal, "user.change_password", _about(user))
    if revoke_credentials:
        credentials.revoke_all(principal, user)
    else:
        credentials.announce(user)


def _role(value: int | None) -> Role | None:
    return None if value is None else Role(value)


def _about(user: User) -> Subject:
    return Subject("user", user.pk, user.username)
