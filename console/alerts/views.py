from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import transaction
from django.forms import Form
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.accounts.browser import SignedInRequest, signed_in
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts import bulk, fixing, runbooks, services, silences, statistics, timeline
from console.alerts.delivering import active_silences, silence_of
from console.alerts.forms import (
    HOURS,
    AcknowledgeForm,
    AssignForm,
    BulkForm,
    CommentForm,
    FilterForm,
    SilenceForm,
)
from console.alerts.services import Filters
from console.fleet.nodes import Impossible
from console.operations.services import Busy
from console.orgs.services import NoSuchUser, visible_orgs
from console.sessions.plans.proposals import CannotPlan

PER_PAGE = 50
SILENCES_SHOWN = 200
NUMBER_DIGITS_MAX = 19


def _filters(form: FilterForm) -> Filters:
    """What a valid form says; nothing where it is not valid, and the page says what is wrong."""
    values = form.cleaned_data if form.is_valid() else {}
    org = values.get("org")
    return Filters(
        state=values.get("state") or "open",
        severity=values.get("severity", ""),
        rule=values.get("rule", ""),
        org_id=org.pk if org else None,
        topic=values.get("topic", ""),
        q=values.get("q", ""),
        hidden=values.get("hidden", False),
    )


@require_safe
@signed_in
def list_alerts(request: SignedInRequest) -> HttpResponse:
    form = FilterForm(request.GET, orgs=visible_orgs(request.principal))
    alerts = _filters(form).apply(request.principal)
    page = Paginator(services.gravest_first(alerts), PER_PAGE).get_page(request.GET.get("page"))
    query = request.GET.copy()
    query.pop("page", None)
    active = active_silences(timezone.now())
    sees_causes = services.sees_causes(request.principal)
    hidden = services.visible_alerts(request.principal).exclude(hidden_by=None)
    context = {
        "form": form,
        "page": page,
        "rows": [
            (alert, silence_of(alert, active), ", ".join(timeline.matchers_of(alert))) for alert in page
        ],
        "query": query.urlencode(),
        "filtered": any(query.values()),
        "evaluator": services.Evaluator.now(),
        "sees_causes": sees_causes,
        "hidden": hidden.count() if sees_causes else 0,
        "live_topic": services.live_topic(request.principal),
        "may_change": _may_on_call(request.principal),
        "hours": HOURS,
    }
    fragment = request.headers.get("HX-Request") == "true"
    return render(request, "alerts/list_live.html" if fragment else "alerts/list.html", context)


@require_safe
@signed_in
def show_alert(request: SignedInRequest, alert_id: int) -> HttpResponse:
    alert = services.get_alert(request.principal, alert_id)
    live = {
        "alert": alert,
        "questions": timeline.questions(alert),
        "fixes": fixing.of(request.principal, alert),
        "evidence": services.evidence(request.principal, alert),
        "entries": timeline.of(request.principal, alert),
    }
    if request.headers.get("HX-Request") == "true":
        return render(request, "alerts/live.html", live)
    role = services.role_over(request.principal, alert.org_id)
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
        "hides": services.visible_alerts(request.principal).filter(hidden_by=alert)[:PER_PAGE],
        "may_change": role is not None and role >= Role.ON_CALL,
        "acknowledge_form": AcknowledgeForm(),
        "comment_form": CommentForm(),
        "assign_form": AssignForm(
            initial={"username": alert.assignee.username if alert.assignee else ""}
        ),
        "silence_matchers": ", ".join(timeline.matchers_of(alert)),
    }
    return render(request, "alerts/alert.html", context)


@require_POST
@signed_in
def acknowledge(request: SignedInRequest, alert_id: int) -> HttpResponse:
    form = AcknowledgeForm(request.POST)
    with transaction.atomic():
        alert = services.for_change(request.principal, alert_id)
        reason = form.cleaned_data["reason"] if form.is_valid() else ""
        services.acknowledge(request.principal, alert, reason)
    return redirect("alert", alert_id)


@require_POST
@signed_in
def unacknowledge(request: SignedInRequest, alert_id: int) -> HttpResponse:
    with transaction.atomic():
        services.unacknowledge(request.principal, services.for_change(request.principal, alert_id))
    return redirect("alert", alert_id)


@require_POST
@signed_in
def comment(request: SignedInRequest, alert_id: int) -> HttpResponse:
    form = CommentForm(request.POST)
    with transaction.atomic():
        alert = services.for_change(request.principal, alert_id)
        if form.is_valid():
            services.comment(request.principal, alert, form.cleaned_data["text"])
        else:
            _complain(request, form)
    return redirect("alert", alert_id)


@require_POST
@signed_in
def assign(request: SignedInRequest, alert_id: int) -> HttpResponse:
    form = AssignForm(request.POST)
    with transaction.atomic():
        alert = services.for_change(request.principal, alert_id)
        if form.is_valid():
            try:
                services.assign(request.principal, alert, form.cleaned_data["username"])
            except NoSuchUser as error:
                messages.error(request, str(error))
        else:
            _complain(request, form)
    return redirect("alert", alert_id)


@require_POST
@signed_in
def fix(request: SignedInRequest, alert_id: int) -> HttpResponse:
    alert = services.get_alert(request.principal, alert_id, Role.ON_CALL)
    try:
        address = fixing.do(request.principal, alert, request.POST.get("kind", ""))
    except (Busy, CannotPlan, Impossible) as error:
        messages.error(request, str(error))
        return redirect("alert", alert_id)
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
        return redirect("alert", alert_id)
    return redirect(address)


def _complain(request: SignedInRequest, form: Form) -> None:
    for field, errors in form.errors.items():
        messages.error(request, f"{field}: {' '.join(map(str, errors))}")


@require_POST
@signed_in
def change_many(request: SignedInRequest) -> HttpResponse:
    """Back to the list as it was filtered."""
    form = BulkForm(request.POST)
    if not form.is_valid():
        messages.error(request, "Say what is to become of them.")
        return _to_list(request)
    values = form.cleaned_data
    try:
        changed = bulk.do(
            request.principal,
            _chosen(request),
            bulk.Verb(values["verb"]),
            username=values["username"],
            ends_at=form.ends_at,
            reason=values["reason"],
        )
    except (NoSuchUser, ValidationError) as error:
        messages.error(request, " ".join(getattr(error, "messages", [str(error)])))
    else:
        said = {"acknowledge": "in hand", "assign": "assigned", "silence": "silent"}[values["verb"]]
        messages.success(request, f"{len(changed)} alert{'s' if len(changed) > 1 else ''}: {said}.")
    return _to_list(request)


def _chosen(request: SignedInRequest) -> list[int]:
    texts = request.POST.getlist("alert")
    return [int(text) for text in texts if text.isdecimal() and len(text) < NUMBER_DIGITS_MAX]


def _to_list(request: SignedInRequest) -> HttpResponse:
    query = QueryDict(request.POST.get("query", "")[:2000]).urlencode()
    return redirect(f"{reverse('alerts')}{'?' if query else ''}{query}")


@require_safe
@signed_in
def show_history(request: SignedInRequest) -> HttpResponse:
    days = request.GET.get("days", "")
    chosen = int(days) if days in map(str, statistics.DAYS) else statistics.DAYS_DEFAULT
    context = {
        "found": statistics.statistics(request.principal, chosen),
        "spans": statistics.DAYS,
    }
    return render(request, "alerts/history.html", context)


# Silences


def _may_on_call(principal: Principal) -> bool:
    """Whether there may be something that they are on call for."""
    return bool(principal.on_platform(Role.ON_CALL) or principal.orgs_where(Role.ON_CALL))


@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
def list_silences(request: SignedInRequest) -> HttpResponse:
    orgs = visible_orgs(request.principal)
    initial = {"matchers": request.GET.get("matchers", ""), "org": request.GET.get("org", "")}
    form = SilenceForm(request.POST or None, orgs=orgs, initial=initial)
    if request.method == "POST" and form.is_valid() and _made(request.principal, form):
        messages.success(request, "It is silent. The alerts are shown as ever.")
        return redirect("alert-silences")
    visible = list(silences.visible_silences(request.principal)[:SILENCES_SHOWN])
    context = {
        "form": form,
        "silences": [(silence, _may_end(request.principal, silence.org_id)) for silence in visible],
        "may_add": _may_on_call(request.principal),
    }
    return render(request, "alerts/silences.html", context)


def _made(principal: Principal, form: SilenceForm) -> bool:
    values = form.cleaned_data
    try:
        silences.create_silence(
            principal,
            org=values["org"],
            matchers=values["matchers"],
            starts_at=None,
            ends_at=timezone.now() + form.length,
            reason=values["reason"],
        )
    except ValidationError as error:
        form.add_error(None, error.messages)
        return False
    return True


def _may_end(principal: Principal, org_id: int | None) -> bool:
    role = services.role_over(principal, org_id)
    return role is not None and role >= Role.ON_CALL


@require_POST
@signed_in
def end_silence(request: SignedInRequest, silence_id: int) -> HttpResponse:
    with transaction.atomic():
        silences.end_silence(request.principal, silences.for_change(request.principal, silence_id))
    messages.success(request, "The silence has ended.")
    return redirect("alert-silences")
