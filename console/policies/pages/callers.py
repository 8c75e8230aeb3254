"""API keys of an org, as a page."""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.accounts.roles import Role
from console.orgs.services import changing, get_org
from console.policies import callers
from console.policies.pages.forms import CallerForm
from console.shell.pages import Refusing


@form_page
def show_callers(request: SignedInRequest, slug: str) -> HttpResponse:
    """List the API keys of an org; a new one is shown this once."""
    org = get_org(request.principal, slug, Role.ORG_ADMIN)
    form = CallerForm(request.POST or None)
    token = ""
    if request.method == "POST" and form.is_valid():
        with Refusing(form, ValidationError), changing(request.principal, slug) as org:
            _, token = callers.add_caller(request.principal, org, name=form.cleaned_data["name"])
            form = CallerForm()
    context = {"org": org, "form": form, "token": token, "callers": callers.callers_of(org)}
    return render(request, "policies/callers.html", context)


@post_page
def remove_caller(request: SignedInRequest, slug: str, public_id: str) -> HttpResponse:
    with changing(request.principal, slug) as org:
        callers.remove_caller(request.principal, org, public_id)
    messages.success(request, "Removed. Brains and drivers reject it within seconds.")
    return redirect("callers", slug)
