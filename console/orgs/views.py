from __future__ import annotations

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page, read_page
from console.accounts.forms import ReasonMixin
from console.accounts.roles import IN_AN_ORG, Role, choices
from console.audit.services import visible_entries
from console.orgs import services
from console.orgs.models import SLUG, SLUG_RULE
from console.policies import services as policies
from console.policies.rollout import reach, served_by
from console.policies.usage import restrictions, usage
from console.shell.pages import Refusing, Telling, check_version, paged, show_faults
from telemetry.topics import of_org

RECENT_CHANGES = 10


class OrgForm(ReasonMixin):
    name = forms.CharField(max_length=120)
    field_order = ["slug", "name", "reason"]


class ChangedOrgForm(OrgForm):
    version = forms.IntegerField(widget=forms.HiddenInput)


class NewOrgForm(OrgForm):
    slug = forms.RegexField(
        SLUG,
        max_length=48,
        label="Short name",
        help_text="Lower-case letters, digits and dashes. Used in URLs; can't be changed.",
        error_messages={"invalid": SLUG_RULE},
    )


class DeleteOrgForm(ReasonMixin):
    typed = forms.CharField(max_length=48, label="Type the org's short name to confirm")
    field_order = ["typed", "reason"]


class MemberForm(ReasonMixin):
    username = forms.CharField(max_length=63, label="User name")
    role = forms.TypedChoiceField(
        coerce=lambda value: Role(int(value)), choices=choices(IN_AN_ORG), initial=Role.VIEWER
    )
    field_order = ["username", "role", "reason"]


@read_page
def list_orgs(request: SignedInRequest) -> HttpResponse:
    listed = paged(request, services.visible_orgs(request.principal))
    may_add = request.principal.on_platform(Role.PLATFORM_ADMIN)
    return render(request, "orgs/list.html", {**listed, "may_add": may_add})


@form_page
def new_org(request: SignedInRequest) -> HttpResponse:
    request.principal.check_platform(Role.PLATFORM_ADMIN)
    form = NewOrgForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        with Refusing(form, ValidationError):
            org = services.create_org(request.principal, **form.cleaned_data)
            messages.success(request, f"{org.name} added. Now add its members.")
            return redirect("org", org.slug)
    return render(request, "orgs/new.html", {"form": form})


@read_page
def show_org(request: SignedInRequest, slug: str) -> HttpResponse:
    org = services.get_org(request.principal, slug)
    held = policies.active_policy(org)
    context = {
        "org": org,
        "topic": of_org(org.slug),
        "held": held,
        "reach": reach(request.principal, held),
        "served_by": served_by(request.principal, org),
        "sees_fleet": request.principal.on_platform(Role.VIEWER),
        "restrictions": restrictions(held),
        "usage": usage(request.principal, held),
        "may_prove": request.principal.holds(Role.ON_CALL, org.pk),
        "role": request.principal.role_in(org.pk),
        "members": services.members(org),
        "may_change": request.principal.holds(Role.ORG_ADMIN, org.pk),
        "member_form": MemberForm(),
        "entries": visible_entries(request.principal).filter(org_id=org.pk)[:RECENT_CHANGES],
    }
    return render(request, "orgs/org.html", context)


@form_page
def edit_org(request: SignedInRequest, slug: str) -> HttpResponse:
    org = services.get_org(request.principal, slug, Role.ORG_ADMIN)
    form = ChangedOrgForm(request.POST or None, initial={"name": org.name, "version": org.version})
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        with Refusing(form, ValidationError), services.changing(request.principal, slug) as fresh:
            check_version(form, fresh.version)
            services.update_org(request.principal, fresh, **values)
            messages.success(request, f"{fresh.name} is saved.")
            return redirect("org", slug)
    context = {
        "form": form,
        "org": org,
        "delete_form": DeleteOrgForm(auto_id="delete_%s"),
        "may_delete": request.principal.on_platform(Role.PLATFORM_ADMIN),
    }
    return render(request, "orgs/edit.html", context)


@post_page
def delete_org(request: SignedInRequest, slug: str) -> HttpResponse:
    form = DeleteOrgForm(request.POST)
    with services.changing(request.principal, slug, Role.PLATFORM_ADMIN) as org:
        if not form.is_valid() or form.cleaned_data["typed"] != slug:
            messages.error(request, f"Not deleted: type “{slug}” to confirm.")
            return redirect("org-edit", slug)
        with Telling(request, services.StillUsed):
            services.delete_org(request.principal, org, form.cleaned_data["reason"])
            messages.success(request, f"{org.name} is deleted.")
            return redirect("orgs")
    return redirect("org-edit", slug)


@post_page
def set_member(request: SignedInRequest, slug: str) -> HttpResponse:
    form = MemberForm(request.POST)
    with services.changing(request.principal, slug) as org:
        if not form.is_valid():
            show_faults(request, form)
            return redirect("org", slug)
        values = form.cleaned_data
        with Telling(request, services.NoSuchUser):
            services.set_member(
                request.principal, org, values["username"], values["role"], reason=values["reason"]
            )
            messages.success(request, f"{values['username']} is now {values['role'].label}.")
    return redirect("org", slug)


@post_page
def remove_member(request: SignedInRequest, slug: str, username: str) -> HttpResponse:
    with services.changing(request.principal, slug) as org:
        services.remove_member(request.principal, org, username)
    messages.success(request, f"{username} is no longer a member.")
    return redirect("org", slug)
