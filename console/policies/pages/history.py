"""Every version of an org's policy as a page, and the button that puts one in force again."""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, post_page, read_page
from console.accounts.roles import Role
from console.orgs.services import changing, get_org
from console.policies import history, services
from console.policies.pages.seen import check_seen
from console.shell.pages import Telling, paged

VERSIONS_PER_PAGE = 10


@read_page
def show_history(request: SignedInRequest, slug: str) -> HttpResponse:
    """Every version, with what it changed and who wanted it."""
    org = get_org(request.principal, slug)
    listed = paged(request, services.versions_of(org), VERSIONS_PER_PAGE)
    context = {
        "org": org,
        "held": services.active_policy(org),
        **listed,
        "versions": history.told(org, list(listed["page"].object_list)),
        "may_change": request.principal.holds(Role.ORG_ADMIN, org.pk),
    }
    return render(request, "policies/history.html", context)


@post_page
def restore(request: SignedInRequest, slug: str, number: int) -> HttpResponse:
    with changing(request.principal, slug) as org:
        reason = request.POST.get("reason", "").strip()[:500] or f"version {number} again"
        if "\x00" in reason:
            raise Http404
        with Telling(request, ValidationError):
            check_seen(request, services.active_policy(org))
            held = services.restore(request.principal, org, number, reason=reason)
            messages.success(request, f"Version {number} restored as version {held.number}.")
    return redirect("policy-history", slug)
