"""Every version of an org's policy as a page, and the button that puts one in force again."""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import transaction
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, post_page, read_page
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.orgs.models import Org
from console.orgs.services import for_change, get_org
from console.policies import history, services

VERSIONS_PER_PAGE = 10


@read_page
def show_history(request: SignedInRequest, slug: str) -> HttpResponse:
    """Every version, with what it changed and who wanted it."""
    org = get_org(request.principal, slug)
    page = Paginator(services.versions_of(org), VERSIONS_PER_PAGE).get_page(request.GET.get("page"))
    context = {
        "org": org,
        "held": services.active_policy(org),
        "page": page,
        "versions": history.told(org, list(page.object_list)),
        "may_change": _may_change(request.principal, org),
    }
    return render(request, "policies/history.html", context)


@post_page
def restore(request: SignedInRequest, slug: str, number: int) -> HttpResponse:
    with transaction.atomic():
        org = for_change(request.principal, slug)
        reason = request.POST.get("reason", "").strip()[:500] or f"version {number} again"
        if "\x00" in reason:
            raise Http404
        try:
            held = services.restore(request.principal, org, number, reason=reason)
        except ValidationError as error:
            messages.error(request, " ".join(error.messages))
            return redirect("policy-history", slug)
    messages.success(request, f"Version {number} restored as version {held.number}.")
    return redirect("policy-history", slug)


def _may_change(principal: Principal, org: Org) -> bool:
    role = principal.role_in(org.pk)
    return role is not None and role >= Role.ORG_ADMIN
