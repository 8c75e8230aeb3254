"""Orgs and their members: who may see them, and every way to change them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from django.db import transaction
from django.db.models import Count, ProtectedError, QuerySet
from django.http import Http404

from console.accounts import credentials
from console.accounts.models import User
from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.control.services import ALL_BRAINS, ALL_DRIVERS, changed
from console.orgs.models import SLUG, Membership, Org
from console.search.services import Found, finder, nearest
from telemetry.store.former import free_topic
from telemetry.topics import of_org

NAMED_MAX: Final = 5
_SLUG: Final = re.compile(SLUG)  # the database does not take every other text


class StillUsed(Exception):
    """Something of the org has to go before it can."""


# Who says what names an org otherwise than by a key of the database.
_users_of: Final[list[Callable[[Org], list[str]]]] = []


def names_orgs(find: Callable[[Org], list[str]]) -> Callable[[Org], list[str]]:
    """Register what finds the things that name an org, which has to be taken off them before it goes."""
    _users_of.append(find)
    return find


class NoSuchUser(Exception):
    """There is no active user of that name."""


def visible_orgs(principal: Principal) -> QuerySet[Org]:
    """The orgs that they may know of, with the number of members."""
    orgs = Org.objects.annotate(member_count=Count("memberships")).order_by("slug")
    known = principal.orgs_with(Role.VIEWER)
    return orgs if known is None else orgs.filter(pk__in=known)


def get_org(principal: Principal, slug: str, at_least: Role = Role.VIEWER) -> Org:
    """The one access function: a stranger gets Http404, a member who may not do it gets Refused."""
    org = Org.objects.filter(slug=slug).first() if _SLUG.match(slug) else None
    return _for_role(principal, org, at_least, "There is no such org.")


def _for_role(principal: Principal, org: Org | None, at_least: Role, absent: str) -> Org:
    role = principal.role_in(org.pk) if org else None
    if org is None or role is None:
        raise Http404(absent)
    if role < at_least:
        raise Refused(f"This needs the role {at_least.label} in {org.name}; yours is {role.label}.")
    return org


def get_orgs(principal: Principal, slugs: Iterable[str], at_least: Role = Role.VIEWER) -> list[Org]:
    """As `get_org` for each of them, in the order of slugs and in one statement."""
    listed = sorted(set(slugs))
    found = {org.slug: org for org in Org.objects.filter(slug__in=listed)}
    return [
        _for_role(principal, found.get(slug), at_least, f"There is no org “{slug}”.") for slug in listed
    ]


def for_change(principal: Principal, slug: str, at_least: Role = Role.ORG_ADMIN) -> Org:
    """The org, locked until the end of the transaction, for somebody who may change it."""
    principal.check_may_change()
    org = get_org(principal, slug, at_least)
    locked = Org.objects.select_for_update(no_key=True).filter(pk=org.pk).first()
    if locked is None:
        raise Http404("There is no such org any more.")
    return locked


def for_change_of_all(principal: Principal, slugs: Iterable[str]) -> list[Org]:
    """As `for_change` for each of them, in the order of slugs and in two statements. They are locked in
    one order, so that two never wait for each other."""
    principal.check_may_change()
    orgs = get_orgs(principal, slugs, Role.ORG_ADMIN)
    rows = Org.objects.select_for_update(no_key=True).order_by("slug")
    locked = {org.slug: org for org in rows.filter(pk__in=[org.pk for org in orgs])}
    if len(locked) < len(orgs):
        raise Http404("There is no such org any more.")
    return [locked[org.slug] for org in orgs]


@contextmanager
def changing(principal: Principal, slug: str, at_least: Role = Role.ORG_ADMIN) -> Iterator[Org]:
    """As `for_change`, with a transaction around it."""
    with transaction.atomic():
        yield for_change(principal, slug, at_least)


@transaction.atomic
def create_org(principal: Principal, *, slug: str, name: str, reason: str = "") -> Org:
    """Add an org. Raises ValidationError where the slug is malformed or taken."""
    principal.check_may_change(Role.PLATFORM_ADMIN)
    org = Org(slug=slug, name=name)
    org.full_clean()
    free_topic(of_org(slug))  # a former org's
    org.save()
    record(principal, "org.create", _about(org), after=org.snapshot(), reason=reason)
    changed([ALL_DRIVERS, ALL_BRAINS], f"org {org.slug} is new")
    return org


@transaction.atomic
def update_org(
    principal: Principal,
    org: Org,
    *,
    name: str,
    reason: str = "",
) -> Org:
    """Rename an org that came from `for_change`. The same name again changes nothing."""
    before = org.snapshot()
    org.name = name
    org.full_clean()
    after = org.snapshot()
    if after == before:
        return org
    org.version += 1
    org.save()
    record(principal, "org.update", _about(org), before=before, after=after, reason=reason)
    return org


@transaction.atomic
def delete_org(principal: Principal, org: Org, reason: str = "") -> None:
    """Delete an org that came from `for_change`, with its memberships and tokens.

    Drivers that hear of it purge what they keep of it. Raises StillUsed.
    """
    principal.check_platform(Role.PLATFORM_ADMIN)
    before = {
        **org.snapshot(),
        "members": {
            membership.user.username: Role(membership.role).label
            for membership in org.memberships.select_related("user")
        },
    }
    if users := [one for find in _users_of for one in find(org)]:
        named = ", ".join(sorted(users)[:NAMED_MAX])
        raise StillUsed(f"{org.name} may use {named}: take it off that first.")
    record(principal, "org.delete", _about(org), before=before, reason=reason)
    try:
        org.delete()
    except ProtectedError as error:
        named = ", ".join(sorted(str(one) for one in error.protected_objects)[:NAMED_MAX])
        raise StillUsed(f"{org.name} still has {named}: delete that first.") from None
    changed([ALL_DRIVERS, ALL_BRAINS], f"org {org.slug} is gone")


@transaction.atomic
def set_member(
    principal: Principal,
    org: Org,
    username: str,
    role: Role,
    *,
    reason: str = "",
) -> Membership:
    """Add a member, or change the role of one. `org` came from `for_change`.

    A lower role revokes the tokens that relied on the former one. Raises NoSuchUser where there is no
    active user of that name.
    """
    user = User.objects.select_for_update(no_key=True).filter(username=username, is_active=True).first()
    if user is None:
        raise NoSuchUser(f"There is no active user “{username}”. A platform admin can add one.")
    membership = Membership.objects.filter(org=org, user=user).first()
    before = membership.snapshot() if membership else None
    role_before = Role(membership.role) if membership else None
    if membership is None:
        membership = Membership(org=org, user=user)
    membership.role = role
    membership.full_clean()
    after = membership.snapshot()
    if after != before:
        membership.save()
        record(
            principal,
            "org.member",
            _about_member(org, user),
            before=before,
            after=after,
            reason=reason,
            sentence=f"{user.username} has the role {role.label} in {org.name}.",
        )
        credentials.revoke_after_fall(principal, user, role_before, role, org.pk)
    return membership


@transaction.atomic
def remove_member(
    principal: Principal,
    org: Org,
    username: str,
    *,
    reason: str = "",
) -> None:
    """Take a member out of an org that came from `for_change`, and revoke their tokens that are confined
    to it. Raises Http404 for no member."""
    membership = (
        Membership.objects.select_related("user").filter(org=org, user__username=username).first()
    )
    if membership is None:
        raise Http404(f"{org.name} has no member “{username}”.")
    user = User.objects.select_for_update(no_key=True).get(pk=membership.user_id)
    record(
        principal,
        "org.member",
        _about_member(org, user),
        before=membership.snapshot(),
        after=None,
        reason=reason,
        sentence=f"{user.username} is no longer a member of {org.name}.",
    )
    membership.delete()
    credentials.revoke_after_fall(principal, user, Role(membership.role), None, org.pk)


def members(org: Org) -> QuerySet[Membership]:
    return org.memberships.select_related("user").order_by("user__username")


@undoable("org.update")
def _undo_update(principal: Principal, entry: AuditEntry, reason: str) -> None:
    org = for_undo(principal, entry)
    if org.snapshot() != entry.after:
        raise CannotUndo("The org was changed again since. Undo the later change first.")
    update_org(principal, org, name=(entry.before or {})["name"], reason=reason)


@undoable("org.member", NoSuchUser)
def _undo_member(principal: Principal, entry: AuditEntry, reason: str) -> None:
    org = for_undo(principal, entry)
    username = entry.object_name
    membership = Membership.objects.filter(org=org, user__username=username).first()
    if (membership.snapshot() if membership else None) != entry.after:
        raise CannotUndo(f"The membership of {username} was changed again since.")
    if entry.before is None:
        remove_member(principal, org, username, reason=reason)
        return
    role = next(role for role in Role if role.label == entry.before["role"])
    set_member(principal, org, username, role, reason=reason)


def for_undo(principal: Principal, entry: AuditEntry) -> Org:
    """The org of an entry, as `for_change`. Raises CannotUndo where it is no more."""
    org = Org.objects.filter(pk=entry.org_id or 0).first()
    if org is None:
        raise CannotUndo("The org no longer exists.")
    return for_change(principal, org.slug)


def _about(org: Org) -> Subject:
    return Subject.of("org", org.slug, org.name, org)


def _about_member(org: Org, user: User) -> Subject:
    return Subject.of("membership", f"{org.slug}/{user.username}", user.username, org)


@finder("orgs")
def find_orgs(principal: Principal, text: str, most: int) -> list[Found]:
    found = nearest(visible_orgs(principal), text, "slug", "name")[:most]
    return [Found(org.name, org.slug, "org", org.slug) for org in found]
