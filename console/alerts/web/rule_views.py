"""Pages of rules and their thresholds."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, read_page
from console.accounts.principal import Principal
from console.alerts import services
from console.alerts.models import Evaluation
from console.alerts.rules import runbooks, thresholds
from console.alerts.rules.catalogue import RULES
from console.alerts.web.forms import ThresholdsForm
from console.audit.services import visible_entries
from console.orgs.models import Org
from console.orgs.services import visible_orgs
from console.shell.pages import Refusing, check_version


@read_page
def list_rules(request: SignedInRequest) -> HttpResponse:
    evaluated, current = Evaluation.objects.in_bulk(), thresholds.for_all()
    context = {
        "rules": [(rule, current[rule.slug], evaluated.get(rule.slug)) for rule in RULES],
        "evaluator": services.Evaluator.now(),
    }
    return render(request, "alerts/rules.html", context)


@form_page
def show_rule(request: SignedInRequest, slug: str) -> HttpResponse:
    """A rule with its thresholds for all, or with `?org=` for an org."""
    rule, principal = thresholds.get_rule(slug), request.principal
    org = thresholds.org_of(principal, rule, request.GET.get("org", ""))
    current = thresholds.get(rule, org)
    inherited = thresholds.inherited(rule, org)
    initial = {one.name: current.values.get(one.name) for one in rule.thresholds}
    initial |= {"enabled": current.enabled, "version": current.version}
    form = ThresholdsForm(request.POST or None, rule=rule, inherited=inherited, initial=initial)
    if request.method == "POST":
        with transaction.atomic():
            fresh = thresholds.thresholds_for_change(principal, rule, org.slug if org else "")
            with Refusing(form, ValidationError):
                if form.is_valid():
                    check_version(form, fresh.version)
            if form.is_valid():
                values = form.cleaned_data
                thresholds.set_thresholds(
                    principal,
                    fresh,
                    values=form.values,
                    enabled=values["enabled"],
                    reason=values["reason"],
                )
                messages.success(request, "Saved. Applies from the next evaluation, in a few seconds.")
                return redirect(request.get_full_path())
            transaction.set_rollback(True)
    context = {
        "rule": rule,
        "org": org,
        "current": current,
        "thresholds": thresholds.effective(rule, current, thresholds.get(rule, None)),
        "form": form if thresholds.may_change(principal, org) else None,
        "orgs": visible_orgs(principal) if rule.per_org else [],
        "runbook": runbooks.rendered(rule.runbook),
        "entries": _entries_of(principal, rule.slug, org),
    }
    return render(request, "alerts/rule.html", context)


def _entries_of(principal: Principal, slug: str, org: Org | None) -> Any:
    object_id = f"{slug}/{org.slug}" if org else slug
    entries = visible_entries(principal).filter(object_type="thresholds", object_id=object_id)
    return entries[:10]
