from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone

from console.accounts.browser import SignedInRequest, form_page, post_page, read_page
from console.accounts.roles import Role
from console.alerts import bulk, services, statistics, timeline
from console.alerts.rules import runbooks
from console.alerts.services import Filters
from console.alerts.state import silences
from console.alerts.state.silences import active_silences, silence_of
from console.alerts.suggested_fixes import services as suggested_fixes
from console.alerts.web.forms import (
    HOURS,
    AcknowledgeForm,
    AssignForm,
    BulkForm,
    CommentForm,
    FilterForm,
    SilenceForm,
)
from console.fleet.nodes import Impossible
from console.operations.services import Busy
from console.orgs.services import NoSuchUser, visible_orgs
from console.sessions.plans.proposals import CannotPlan
from console.shell.pages import Refusing, Telling, paged, render_live, show_faults, wants_part
from telemetry.units import counted

SILENCES_SHOWN = 200
SUPPRESSED_SHOWN = 50
NUMBER_DIGITS_MAX = 19


def _filters(form: FilterForm) -> Filters:
    """The filters of a form. An invalid form filters nothing, and the page shows its errors."""
    values = form.cleaned_data if form.is_valid() else {}
    return Filters(**values | {"state": values.get("state") or "open"})


@read_page
def list_alerts(request: SignedInRequest) -> HttpResponse:
    form = FilterForm(request.GET, orgs=visible_orgs(request.principal))
    alerts = _filters(form).apply(request.principal)
    listed = paged(request, services.gravest_first(alerts))
    active = active_silences(timezone.now())
    sees_causes = services.sees_causes(request.principal)
    suppressed = services.visible_alerts(request.principal).exclude(suppressed_by=None)
    context = {
        **listed,
        "form": form,
        "rows": [
            (alert, silence_of(alert, active), ", ".join(timeline.matchers_of(alert)))
            for alert in listed["page"]
        ],
        "evaluator": services.Evaluator.now(),
        "sees_causes": sees_causes,
        "suppressed": suppressed.count() if sees_causes else 0,
        "live_topic": services.live_topic(request.principal),
        "may_change": request.principal.anywhere(Role.ON_CALL),
        "hours": HOURS,
    }
    return render_live(request, "alerts/list", context)


@form_page
def show_alert(request: SignedInRequest, alert_id: int) -> HttpResponse:
    """The page of one alert; a POST comments on it."""
    is_comment = request.method == "POST"
    alert = services.get_alert(request.principal, alert_id, Role.ON_CALL if is_comment else Role.VIEWER)
    form = CommentForm(request.POST or None)
    if is_comment and form.is_valid():
        services.comment(request.principal, alert_id, form.cleaned_data["text"])
        return redirect("alert", alert_id)
    live = {
        "alert": alert,
        "questions": timeline.questions(alert),
        "fixes": suggested_fixes.suggest(request.principal, alert),
        "evidence": services.evidence(request.principal, alert),
        "entries": timeline.of(request.principal, alert),
    }
    if wants_part(request):
        return render(request, "alerts/live.html", live)
    rule = alert.definition
    context = {
        **live,
        "live_topic": services.live_topic(request.principal, alert),
        "sees_causes": services.sees_causes(request.principal),
        "rule": rule,
        "runbook": runbooks.rendered(rule.runbook) if rule else "",
        "charts": timeline.charts(request.principal, alert),
        "around": timeline.around(alert, timezone.now()),
        "changes": services.changed_before(request.principal, alert),
        "silence": silence_of(alert, active_silences(timezone.now())),
        "suppresses": services.visible_alerts(request.principal).filter(suppressed_by=alert)[
            :SUPPRESSED_SHOWN
        ],
        "may_change": request.principal.holds(Role.ON_CALL, alert.org_id),
        "acknowledge_form": AcknowledgeForm(),
        "comment_form": form,
        "assign_form": AssignForm(
            initial={"username": alert.assignee.username if alert.assignee else ""}
        ),
        "silence_matchers": ", ".join(timeline.matchers_of(alert)),
    }
    return render(request, "alerts/alert.html", context)


@post_page
def acknowledge(request: SignedInRequest, alert_id: int) -> HttpResponse:
    form = AcknowledgeForm(request.POST)
    if form.is_valid():
        with Telling(request, Impossible):
            services.acknowledge(request.principal, alert_id, form.cleaned_data["reason"])
    else:
        show_faults(request, form)
    return redirect("alert", alert_id)


@post_page
def unacknowledge(request: SignedInRequest, alert_id: int) -> HttpResponse:
    services.unacknowledge(request.principal, alert_id)
    return redirect("alert", alert_id)


@post_page
def assign(request: SignedInRequest, alert_id: int) -> HttpResponse:
    form = AssignForm(request.POST)
    if form.is_valid():
        with Telling(request, NoSuchUser):
            services.assign(request.principal, alert_id, form.cleaned_data["username"])
    else:
        show_faults(request, form)
    return redirect("alert", alert_id)


@post_page
def apply_fix(request: SignedInRequest, alert_id: int) -> HttpResponse:
    alert = services.get_alert(request.principal, alert_id, Role.ON_CALL)
    with Telling(request, Busy, CannotPlan, Impossible, ValidationError):
        return redirect(suggested_fixes.apply(request.principal, alert, request.POST.get("action", "")))
    return redirect("alert", alert_id)


@post_page
def change_many(request: SignedInRequest) -> HttpResponse:
    """Apply a bulk change, and return to the list with its filters."""
    form = BulkForm(request.POST)
    if not form.is_valid():
        messages.error(request, "Choose what to do with the selected alerts.")
        return _to_list(request)
    values = form.cleaned_data
    with Telling(request, NoSuchUser, ValidationError):
        changed = bulk.do(
            request.principal,
            _selected(request),
            bulk.Verb(values["verb"]),
            username=values["username"],
            ends_at=form.ends_at,
            reason=values["reason"],
        )
        done = {"acknowledge": "acknowledged", "assign": "assigned", "silence": "silenced"}
        if values["verb"] == "acknowledge":
            acknowledged = [one for one in changed if one.acknowledged_at]
            if over := len(changed) - len(acknowledged):
                messages.info(request, f"{counted(over, 'alert')} not acknowledged: no longer open.")
            changed = acknowledged
        if changed:
            messages.success(request, f"{counted(len(changed), 'alert')} {done[values['verb']]}.")
    return _to_list(request)


def _selected(request: SignedInRequest) -> list[int]:
    texts = request.POST.getlist("alert")
    return [int(text) for text in texts if text.isdecimal() and len(text) < NUMBER_DIGITS_MAX]


def _to_list(request: SignedInRequest) -> HttpResponse:
    query = QueryDict(request.POST.get("query", "")[:2000]).urlencode()
    return redirect(f"{reverse('alerts')}{'?' if query else ''}{query}")


@read_page
def show_history(request: SignedInRequest) -> HttpResponse:
    days = request.GET.get("days", "")
    chosen = int(days) if days in map(str, statistics.DAYS) else statistics.DAYS_DEFAULT
    context = {
        "found": statistics.statistics(request.principal, chosen),
        "spans": statistics.DAYS,
    }
    return render(request, "alerts/history.html", context)


# Silences


@form_page
def list_silences(request: SignedInRequest) -> HttpResponse:
    orgs = visible_orgs(request.principal)
    initial = {"matchers": request.GET.get("matchers", ""), "org": request.GET.get("org", "")}
    form = SilenceForm(request.POST or None, orgs=orgs, initial=initial)
    if request.method == "POST" and form.is_valid():
        with Refusing(form, ValidationError):
            silences.create_silence(
                request.principal,
                org=form.cleaned_data["org"],
                matchers=form.cleaned_data["matchers"],
                starts_at=None,
                ends_at=timezone.now() + form.duration,
                reason=form.cleaned_data["reason"],
            )
            messages.success(request, "Silence created. Matching alerts are still shown.")
            return redirect("alert-silences")
    visible = list(silences.visible_silences(request.principal)[:SILENCES_SHOWN])
    context = {
        "form": form,
        "silences": [
            (silence, request.principal.holds(Role.ON_CALL, silence.org_id)) for silence in visible
        ],
        "may_add": request.principal.anywhere(Role.ON_CALL),
    }
    return render(request, "alerts/silences.html", context)


@post_page
def end_silence(request: SignedInRequest, silence_id: int) -> HttpResponse:
    with transaction.atomic():
        silences.end_silence(request.principal, silences.for_change(request.principal, silence_id))
    messages.success(request, "Silence ended.")
    return redirect("alert-silences")
