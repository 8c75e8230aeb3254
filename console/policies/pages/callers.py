"""Who may ask drivers in the name of an org, as a page."""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.accounts.roles import Role
from console.orgs.services import for_change, get_org
from console.policies import callers
from console.policies.pages.forms import CallerForm


@form_page
def show_callers(request: SignedInRequest, slug: str) -> HttpResponse:
    """List the engine tokens of an org; a new one's token is shown this once."""
    org = get_org(request.principal, slug, Role.ORG_ADMIN)
    form = CallerForm(request.POST or None)
    token = ""
    if request.method == "POST" and form.is_valid():
        try:
            with transaction.atomic():
                org = for_change(request.principal, slug)
                _, token = callers.add_caller(request.principal, org, name=form.cleaned_data["name"])
            form = CallerForm()
        except ValidationError as error:
            form.add_error(None, ValidationError(error.messages))
    context = {"org": org, "form": form, "token": token, "callers": callers.callers_of(org)}
    return render(request, "policies/callers.html", context)


@post_page
def remove_caller(request: SignedInRequest, slug: str, public_id: str) -> HttpResponse:
    with transaction.atomic():
        org = for_change(request.principal, slug)
        callers.remove_caller(request.principal, org, public_id)
    messages.success(request, "Removed. Drivers refuse its token from now on.")
    return redirect("callers", slug)
