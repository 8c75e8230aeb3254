"""Saved views: who sees them, and how they come and go."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import Http404
from django.urls import Resolver404, resolve

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.orgs.services import get_org, visible_orgs
from console.saved.models import SavedView

VIEWS_MAX: Final = 100  # of one person
PLATFORM: Final = "platform"
_OF_ORG: Final = "org:"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\\]")


def visible_views(principal: Principal) -> QuerySet[SavedView]:
    """Their own, and those that are shared with them. A token of one org sees that org's only."""
    views = SavedView.objects.select_related("owner", "org")
    shared = Q(org__in=visible_orgs(principal).values("pk"))
    if principal.token and principal.token.org_id is not None:
        return views.filter(shared)
    if principal.on_platform(Role.VIEWER):
        shared |= Q(on_platform=True)
    return views.filter(shared | Q(owner=principal.user_id))


def views_of(principal: Principal, path: str) -> QuerySet[SavedView]:
    """Of one page."""
    return visible_views(principal).filter(Q(address=path) | Q(address__startswith=f"{path}?"))


@transaction.atomic
def save_view(principal: Principal, *, name: str, address: str, share: str = "") -> SavedView:
    """Keep a view. `share`: nothing, `platform`, or `org:` and the short name of an org that they may
    see. Raises ValidationError for what is no page of ours, Http404 for an org that is not theirs."""
    principal.check_may_change()
    if principal.user is None or (principal.token and principal.token.org_id is not None):
        raise Refused("A view belongs to a person: come as one, without a token of an org.")
    if principal.user.saved_views.count() >= VIEWS_MAX:
        raise ValidationError({"name": [f"At most {VIEWS_MAX}. Delete one that you don't need."]})
    view = SavedView(owner=principal.user, name=name.strip(), address=_page(address))
    if share == PLATFORM:
        principal.check_platform(Role.VIEWER)
        view.on_platform = True
    elif share.startswith(_OF_ORG):
        view.org = get_org(principal, share.removeprefix(_OF_ORG))
    elif share:
        raise ValidationError({"share": ["Say platform, org:… or nothing."]})
    view.full_clean()
    view.save()
    record(principal, "view.save", _about(view), after=view.snapshot())
    return view


@transaction.atomic
def delete_view(principal: Principal, number: int) -> None:
    """One's own; one that is shared also by who runs what it is shared with. Http404 for what they can't
    see, Refused for what they may not delete."""
    principal.check_may_change()
    view = (
        visible_views(principal).select_for_update(no_key=True, of=("self",)).filter(pk=number).first()
    )
    if view is None:
        raise Http404("There is no such view, or it is not yours to see.")
    if not may_delete(principal, view):
        raise Refused(f"{view.name} is {view.owner.username}'s.")
    record(principal, "view.delete", _about(view), before=view.snapshot())
    view.delete()


def may_delete(principal: Principal, view: SavedView) -> bool:
    if view.owner_id == principal.user_id:
        return True
    return principal.holds(Role.ORG_ADMIN if view.org_id else Role.PLATFORM_ADMIN, view.org_id)


def _page(address: str) -> str:
    """Raises ValidationError for what is no page of this console."""
    parts = urlsplit(address)
    is_here = not (parts.scheme or parts.netloc or _CONTROL.search(address))
    if not is_here or not _is_page(parts.path):
        raise ValidationError({"address": ["That is no page of this console."]})
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def _is_page(path: str) -> bool:
    try:
        return not resolve(path).namespaces  # the API has one
    except Resolver404:
        return False


def _about(view: SavedView) -> Subject:
    """Without topics: nothing has happened to an org or the fleet, whose charts would mark it."""
    return Subject("view", view.pk, view.name, view.org_id)
