from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.orgs.services import visible_orgs
from console.saved import services
from console.saved.models import ADDRESS_MAX, NAME_MAX
from console.saved.services import PLATFORM
from console.shell.pages import Refusing

ORGS_MAX = 100  # of a picker


class SaveForm(forms.Form):
    name = forms.CharField(max_length=NAME_MAX)
    address = forms.CharField(max_length=ADDRESS_MAX, widget=forms.HiddenInput)
    share = forms.ChoiceField(required=False, label="Shared with")

    def __init__(self, principal: Principal, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fields["share"].choices = shares(principal)  # type: ignore[attr-defined]  # a choice field


def shares(principal: Principal) -> list[tuple[str, str]]:
    """With whom they may share a view."""
    found = [("", "nobody")]
    if principal.on_platform(Role.VIEWER):
        found.append((PLATFORM, "everybody with a role on the platform"))
    orgs = visible_orgs(principal)[:ORGS_MAX]
    return [*found, *((f"org:{org.slug}", f"members of {org.name}") for org in orgs)]


@form_page
def list_views(request: SignedInRequest) -> HttpResponse:
    """All that they see; and where a page's own form leads that saves it."""
    of = {"address": request.GET.get("of", "")}
    form = SaveForm(request.principal, request.POST or None, initial=of)
    if request.method == "POST" and form.is_valid():
        with Refusing(form, ValidationError):
            view = services.save_view(request.principal, **form.cleaned_data)
            messages.success(request, f"“{view.name}” is saved.")
            return redirect(view.address)
    listed = [
        (view, services.may_delete(request.principal, view))
        for view in services.visible_views(request.principal)
    ]
    return render(request, "saved/list.html", {"views": listed, "form": form})


@post_page
def delete_view(request: SignedInRequest, number: int) -> HttpResponse:
    services.delete_view(request.principal, number)
    messages.success(request, "Deleted.")
    return redirect("views")
