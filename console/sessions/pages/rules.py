from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.roles import Role
from console.audit.services import visible_entries
from console.fleet.nodes import Impossible
from console.orgs.models import Org
from console.orgs.services import get_org
from console.placement.topology import Misconfigured
from console.sessions import holders
from console.sessions import rules as services
from console.sessions.models import RuleSet, Session
from console.sessions.pages.forms import RulesForm
from console.sessions.plans.holders import without_count
from console.shell.pages import Refusing, check_version
from console.visibility import sees_fleet

RECENT = 10


@form_page
def cluster_rules(request: SignedInRequest) -> HttpResponse:
    return _page(request, None)


@form_page
def org_rules(request: SignedInRequest, slug: str) -> HttpResponse:
    return _page(request, get_org(request.principal, slug))


def _recodings(rules: RuleSet, values: Mapping[str, Any]) -> list[str]:
    """What is lost by these values, in sentences."""
    changed = copy(rules)
    for name, value in values.items():
        setattr(changed, name, value)
    return [str(one) for one in holders.recodings(changed)]


def _page(request: SignedInRequest, org: Org | None) -> HttpResponse:
    principal = request.principal
    rules = services.get_rules(principal, org)
    form = RulesForm(
        request.POST or None,
        initial={**rules.snapshot(), "version": rules.version},
        has_quota=org is not None,
        may_set_quota=principal.on_platform(Role.PLATFORM_ADMIN),
    )
    recodings: list[str] = []
    if request.method == "POST" and form.is_valid():
        values = {**form.cleaned_data}
        reason, _ = values.pop("reason"), values.pop("version")
        with Refusing(form, Impossible, Misconfigured, ValidationError):
            recodings = _recodings(rules, values)
            if recodings and request.POST.getlist("seen") != recodings:
                raise Impossible("Not saved yet: columns would be lost. Look below.")
            with transaction.atomic():
                fresh = services.for_change(principal, org)
                check_version(form, fresh.version)
                services.set_rules(principal, fresh, values, reason=reason)
            messages.success(request, "Rules saved.")
            return redirect(request.path)
    holders_now, too_few = holders.preview(org)
    entries = visible_entries(principal).filter(
        object_type="rules", object_id=org.slug if org else services.CLUSTER
    )
    context = {
        "form": form,
        "org": org,
        "rules": rules,
        "boxes_used": services.held_by(org) if org else None,
        "replicas_used": services.replicas_of(org) if org else None,
        "effective": services.effective_rules(org),
        "holders_now": holders_now if sees_fleet(principal) else None,
        "too_few_holders": too_few if sees_fleet(principal) else without_count(too_few),
        "recodings": recodings,
        "may_change": services.may_change(principal, org),
        "entries": entries[:RECENT],
        "sessions": Session.objects.filter(org=org).count() if org else Session.objects.count(),
    }
    return render(request, "sessions/rules.html", context)
