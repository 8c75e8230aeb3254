"""Policies of many orgs on one page, one change for many, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, read_page
from console.accounts.roles import Role
from console.operations.services import StalePlan
from console.orgs.services import visible_orgs
from console.policies import bulk, documents, sentences, services
from console.policies.documents import ClusterPolicies, Malformed
from console.policies.pages.forms import BulkForm, ClusterForm, ClusterReasonForm, PolicyForm
from console.policies.preview import estimates
from console.shell.pages import Refusing, check_version, paged

FORETOLD_MAX = 8  # orgs whose hit rates are shown before a bulk edit: each asks drivers


@read_page
def list_policies(request: SignedInRequest) -> HttpResponse:
    asked = request.GET.get("q", "").strip().replace("\x00", "")[:120]
    found = visible_orgs(request.principal)
    if asked:
        found = found.filter(Q(slug__icontains=asked) | Q(name__icontains=asked))
    listed = paged(request, found)
    cluster = services.cluster()
    rows = [
        (
            held,
            sentences.sentence(held.policy),
            request.principal.holds(Role.ORG_ADMIN, held.org.pk),
        )
        for held in services.active_policies(listed["page"].object_list, cluster)
    ]
    context = {
        **listed,
        "rows": rows,
        "q": asked,
        "may_edit": any(may for _, _, may in rows),
        "cluster": cluster,
        "default": sentences.sentence(cluster.policies.default),
        "may_change": request.principal.on_platform(Role.PLATFORM_ADMIN),
    }
    return render(request, "policies/list.html", context)


@form_page
def edit_many(request: SignedInRequest) -> HttpResponse:
    """Choose, look, save: the same form each time, with what it would do below."""
    source = request.POST if request.method == "POST" else request.GET
    slugs = [slug for slug in source.getlist("org") if "\x00" not in slug][: bulk.ORGS_MAX + 1]
    if not slugs:
        messages.error(request, "Select at least one org.")
        return redirect("policies")
    form = BulkForm(request.POST if request.method == "POST" else None)
    planned: list[bulk.Planned] = []
    with Refusing(form, ValidationError, StalePlan, Malformed):
        changes = form.changes() if form.is_bound and form.is_valid() else {}
        planned = bulk.plan(request.principal, slugs, changes)
        if changes and "save" in request.POST:
            saved = bulk.save(
                request.principal,
                slugs,
                changes,
                reason=form.cleaned_data["reason"],
                token=form.cleaned_data["token"],
            )
            count = sum(one.active is not one.held for one in saved)
            sent = "It is sent to the drivers now." if count else "It changes nothing."
            messages.success(request, f"Saved for {count} of {len(saved)} orgs. {sent}")
            return redirect("policies")
    context = {
        "form": form,
        "slugs": slugs,
        "planned": [(one, _foretold(one, at)) for at, one in enumerate(planned)],
        "looked": form.is_bound and form.is_valid() and bool(form.changes()),
        "refused": any(one.refused for one in planned),
        "token": bulk.token_of(planned),
    }
    return render(request, "policies/bulk.html", context)


def _foretold(one: bulk.Planned, at: int) -> Any:
    """Hit rates, for as many as can be asked for at once."""
    if at >= FORETOLD_MAX or not one.differences:
        return None
    return estimates.foretell(one.org, one.held.policies, one.wanted).preview


@form_page
def edit_cluster(request: SignedInRequest) -> HttpResponse:
    request.principal.check_platform(Role.PLATFORM_ADMIN)
    held = services.cluster()
    data = request.POST if request.method == "POST" else None
    policy = PolicyForm(
        data, initial=PolicyForm.initial_of(held.policies.default), prefix="default", limits=None
    )
    limits = ClusterForm(data, initial=documents.spelled_out(held.policies.limits), prefix="limits")
    reason = ClusterReasonForm(data, initial={"version": held.number})
    valid = [form.is_valid() for form in (policy, limits, reason)]
    if data is not None and all(valid) and policy.policy is not None:
        wanted = ClusterPolicies(default=policy.policy, limits=limits.limits())
        values = reason.cleaned_data
        with Refusing(reason, ValidationError, services.StaleCluster):
            check_version(reason, held.number, beside=(policy, limits))
            services.set_cluster(
                request.principal, wanted, reason=values["reason"], if_number=held.number
            )
            messages.success(request, "Saved. It applies to all orgs from now on.")
            return redirect("policies")
    context = {"policy": policy, "limits": limits, "reason": reason, "held": held}
    return render(request, "policies/cluster.html", context)
