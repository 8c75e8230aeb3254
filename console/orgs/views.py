from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.accounts.browser import SignedInRequest, signed_in
from console.accounts.roles import Role
from console.audit.services import visible_entries
from console.orgs import services
from console.orgs.forms import DeleteOrgForm, MemberForm, NewOrgForm, OrgForm
from console.policies import services as policies
from console.policies.rollout import reach
from console.policies.usage import restrictions, usage
from telemetry.topics import of_org

RECENT_CHANGES = 10
SHOWN_MAX = 500


@require_safe
@signed_in
def list_orgs(request: SignedInRequest) -> HttpResponse:
    orgs = services.visible_orgs(request.principal)[:SHOWN_MAX]
    may_add = request.principal.on_platform(Role.PLATFORM_ADMIN)
    return render(request, "orgs/list.html", {"orgs": orgs, "may_add": may_add})


@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
def new_org(request: SignedInRequest) -> HttpResponse:
    request.principal.check_platform(Role.PLATFORM_ADMIN)
    form = NewOrgForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            org = services.create_org(request.principal, **form.cleaned_data)
        except ValidationError as error:
            form.add_error(None, error)
        else:
            messages.success(request, f"{org.name} is there. Now add its members.")
            return redirect("org", org.slug)
    return render(request, "orgs/new.html", {"form": form})


@require_safe
@signed_in
def show_org(request: SignedInRequest, slug: str) -> HttpResponse:
    org = services.get_org(request.principal, slug)
    role = request.principal.role_in(org.pk)
    held = policies.active_policy(org)
    context = {
        "org": org,
        "topic": of_org(org.slug),
        "held": held,
        "reach": reach(request.principal, held),
        "restrictions": restrictions(held),
        "usage": usage(request.principal, held),
        "may_prove": role is not None and role >= Role.ON_CALL,
        "role": role,
        "members": services.members(org),
        "may_change": role is not None and role >= Role.ORG_ADMIN,
        "member_form": MemberForm(),
        "entries": visible_entries(request.principal).filter(org_id=org.pk)[:RECENT_CHANGES],
    }
    return render(request, "orgs/org.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
def edit_org(request: SignedInRequest, slug: str) -> HttpResponse:
    org = services.get_org(request.principal, slug, Role.ORG_ADMIN)
    form = OrgForm(request.POST or None, initial={"name": org.name})
    if request.method == "POST" and form.is_valid():
        with transaction.atomic():
            org = services.for_change(request.principal, slug)
            services.update_org(request.principal, org, **form.cleaned_data)
        messages.success(request, f"{org.name} is saved.")
        return redirect("org", slug)
    context = {
        "form": form,
        "org": org,
        "delete_form": DeleteOrgForm(auto_id="delete_%s"),
        "may_delete": request.principal.on_platform(Role.PLATFORM_ADMIN),
    }
    return render(request, "orgs/edit.html", context)


@require_POST
@signed_in
def delete_org(request: SignedInRequest, slug: str) -> HttpResponse:
    form = DeleteOrgForm(request.POST)
    with transaction.atomic():
        org = services.for_change(request.principal, slug, Role.PLATFORM_ADMIN)
        if not form.is_valid() or form.cleaned_data["typed"] != slug:
            messages.error(request, f"Not deleted: type “{slug}” to confirm.")
            return redirect("org-edit", slug)
        try:
            services.delete_org(request.principal, org, form.cleaned_data["reason"])
        except services.StillUsed as error:
            messages.error(request, str(error))
            return redirect("org-edit", slug)
    messages.success(request, f"{org.name} is deleted.")
    return redirect("orgs")


@require_POST
@signed_in
def set_member(request: SignedInRequest, slug: str) -> HttpResponse:
    form = MemberForm(request.POST)
    with transaction.atomic():
        org = services.for_change(request.principal, slug)
        if not form.is_valid():
            for field, errors in form.errors.items():
                messages.error(request, f"{field}: {' '.join(str(error) for error in errors)}")
            return redirect("org", slug)
        values = form.cleaned_data
        try:
            services.set_member(
                request.principal, org, values["username"], values["role"], reason=values["reason"]
            )
        except services.NoSuchUser as error:
            messages.error(request, str(error))
        else:
            messages.success(request, f"{values['username']} is now {values['role'].label}.")
    return redirect("org", slug)


@require_POST
@signed_in
def remove_member(request: SignedInRequest, slug: str, username: str) -> HttpResponse:
    with transaction.atomic():
        org = services.for_change(request.principal, slug)
        services.remove_member(request.principal, org, username)
    messages.success(request, f"{username} is no longer a member.")
    return redirect("org", slug)
