"""Buckets as pages: the list with who uses each, and adding, replacing and deleting credentials."""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.accounts.principal import Refused
from console.accounts.roles import Role
from console.fleet.nodes import Impossible
from console.orgs.services import visible_orgs
from console.shell.pages import Refusing, Telling, check_version, paged
from console.visibility import of_orgs
from console.workloads import buckets, services
from console.workloads.pages.forms import BucketForm, CredentialsForm


@form_page
def list_buckets(request: SignedInRequest) -> HttpResponse:
    principal = request.principal
    form = None
    if services.may_add(principal):
        form = BucketForm(
            request.POST or None,
            orgs=visible_orgs(principal).filter(of_orgs(principal, Role.ORG_ADMIN, field="pk")),
            may_share=principal.on_platform(Role.PLATFORM_ADMIN),
        )
    if request.method == "POST":
        if form is None:
            raise Refused("Storing credentials needs the role org admin.")
        if form.is_valid() and (answer := _added(request, form)) is not None:
            return answer
    context = paged(request, buckets.visible(principal))
    shown = list(context["page"])
    users = buckets.users_of(shown, principal)
    rows = [(one, users[one.pk], buckets.may_change(principal, one)) for one in shown]
    return render(request, "workloads/buckets.html", context | {"form": form, "rows": rows})


def _added(request: SignedInRequest, form: BucketForm) -> HttpResponse | None:
    """None where it was refused; then the form says why."""
    said = form.cleaned_data
    with Refusing(form, ValidationError, Http404):
        made = buckets.add(
            request.principal,
            said["org"].slug if said["org"] else None,
            name=said["name"],
            endpoint=said["endpoint"],
            **form.values(),
        )
        messages.success(request, f"Credentials for {made} are stored.")
        return redirect("buckets")
    return None


@form_page
def show_bucket(request: SignedInRequest, number: int) -> HttpResponse:
    """Its credentials can be replaced and deleted, and not be read."""
    principal = request.principal
    found = buckets.get(principal, number)
    if not buckets.may_change(principal, found):
        raise Refused("Replacing credentials needs the role of an admin of their owner.")
    form = CredentialsForm(
        request.POST or None,
        may_share=found.org_id is None,
        initial={name: getattr(found, name) for name in ("region", "shared", "version")},
    )
    if request.method == "POST" and form.is_valid():
        with Refusing(form, ValidationError), transaction.atomic():
            fresh = buckets.for_change(principal, number)
            check_version(form, fresh.version)
            buckets.replace(principal, fresh, **form.values())
            messages.success(request, f"Credentials for {fresh} are replaced.")
            return redirect("buckets")
    users = buckets.users_of([found], principal)[number]
    context = {"bucket": found, "form": form, "users": users}
    return render(request, "workloads/bucket.html", context)


@post_page
@transaction.atomic
def delete_bucket(request: SignedInRequest, number: int) -> HttpResponse:
    with Telling(request, Impossible):
        found = buckets.for_change(request.principal, number)
        buckets.delete(request.principal, found)
        messages.success(request, f"Credentials for {found} are deleted.")
    return redirect("buckets")
