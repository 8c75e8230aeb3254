"""The proof as a page, and the button that purges."""

from __future__ import annotations

import json

from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, post_page, read_page
from console.accounts.roles import Role
from console.operations import services as operations
from console.orgs.services import changing, get_org
from console.policies.evidence import purges, reports, signatures
from console.policies.evidence.reports import DAYS, Report
from console.policies.evidence.standings import standings_of
from console.policies.pages.forms import PurgeForm
from console.policies.rollout import own_drivers
from console.shell.pages import Refusing

DAYS_DEFAULT = 30


def _days(request: HttpRequest) -> int:
    asked = request.GET.get("days", "")
    return next((days for days in DAYS if str(days) == asked), DAYS_DEFAULT)


def _report(request: SignedInRequest, slug: str) -> Report:
    return reports.report(get_org(request.principal, slug, Role.ON_CALL), _days(request))


@read_page
def show(request: SignedInRequest, slug: str) -> HttpResponse:
    return _page(request, slug, PurgeForm())


def _page(request: SignedInRequest, slug: str, form: PurgeForm) -> HttpResponse:
    told = _report(request, slug)
    running = operations.running_on(f"org:{told.org.slug}")
    is_staff = request.principal.on_platform(Role.VIEWER)
    own = own_drivers(slug)
    receipts = [
        (receipt, standings_of(receipt.places, own, is_staff=is_staff)) for receipt in told.receipts
    ]
    context = {
        "org": told.org,
        "told": told,
        "days": _days(request),
        "spans": DAYS,
        "may_change": request.principal.holds(Role.ORG_ADMIN, told.org.pk),
        "form": form,
        "receipts": receipts,
        "running": running,
        "standings": standings_of(running.notes, own, is_staff=is_staff) if running else [],
    }
    return render(request, "policies/retention.html", context)


@read_page
def as_csv(request: SignedInRequest, slug: str) -> HttpResponse:
    told = _report(request, slug)
    return _file(reports.as_csv(told), "text/csv", f"retention-{slug}.csv")


@read_page
def as_json(request: SignedInRequest, slug: str) -> HttpResponse:
    """The statement, and the same signed."""
    statement = _report(request, slug).statement()
    signed = {"report": statement, "jws": signatures.sign(statement)}
    return _file(json.dumps(signed, indent=2), "application/json", f"retention-{slug}.json")


def _file(text: str, kind: str, name: str) -> HttpResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return HttpResponse(text, content_type=f"{kind}; charset=utf-8", headers=headers)


@post_page
def purge(request: SignedInRequest, slug: str) -> HttpResponse:
    form = PurgeForm(request.POST)
    with changing(request.principal, slug) as org:
        if form.is_valid() and form.cleaned_data["typed"] != slug:
            form.add_error("typed", f"Nothing is purged: type “{slug}” to confirm.")
        if form.is_valid():
            with Refusing(form, operations.Busy, ValidationError):
                values = form.cleaned_data
                operation = purges.purge(
                    request.principal, org, model=values["model"], reason=values["reason"]
                )
                return redirect("operation", operation.pk)
    return _page(request, slug, form)
