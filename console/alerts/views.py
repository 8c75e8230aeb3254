from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import transaction
from django.forms import Form
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.accounts.browser import SignedInRequest, signed_in
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts import channels, fixes, limits, runbooks, services, silences, timeline
from console.alerts.catalogue import RULES
from console.alerts.delivering import active_silences, silence_of
from console.alerts.forms import (
    AcknowledgeForm,
    AssignForm,
    ChannelForm,
    CommentForm,
    FilterForm,
    NewChannelForm,
    SilenceForm,
    ThresholdsForm,
)
from console.alerts.models import Channel, Evaluation
from console.alerts.services import Filters
from console.audit.services import visible_entries
from console.operations.services import Busy
from console.orgs.models import Org
from console.orgs.services import NoSuchUser, visible_orgs
from console.sessions.planning import CannotPlan

PER_PAGE = 50
LOG_ROWS = 50
SILENCES_SHOWN = 200


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
    alerts = _filters(form).apply(services.visible_alerts(request.principal))
    page = Paginator(services.gravest_first(alerts), PER_PAGE).get_page(request.GET.get("page"))
    query = request.GET.copy()
    query.pop("page", None)
    active = active_silences(timezone.now())
    context = {
        "form": form,
        "page": page,
        "rows": [(alert, silence_of(alert, active)) for alert in page],
        "query": query.urlencode(),
        "filtered": any(query.values()),
        "evaluator": services.Evaluator.now(),
        "hidden": services.visible_alerts(request.principal).exclude(hidden_by=None).count(),
        "live_topic": services.live_topic(request.principal),
    }
    fragment = request.headers.get("HX-Request") == "true"
    return render(request, "alerts/list_live.html" if fragment else "alerts/list.html", context)


@require_safe
@signed_in
def show_alert(request: SignedInRequest, alert_id: int) -> HttpResponse:
    alert = services.get_alert(request.principal, alert_id)
    facts = {
        "alert": alert,
        "questions": timeline.questions(alert),
        "live_topic": services.live_topic(request.principal, alert),
    }
    if request.headers.get("HX-Request") == "true":
        return render(request, "alerts/facts.html", facts)
    role = services.role_over(request.principal, alert.org_id)
    rule = alert.definition
    context = {
        **facts,
        "rule": rule,
        "runbook": runbooks.rendered(rule.runbook) if rule else "",
        "charts": timeline.charts(request.principal, alert),
        "entries": timeline.of(alert),
        "changes": services.changed_before(request.principal, alert),
        "fixes": fixes.of(request.principal, alert),
        "silence": silence_of(alert, active_silences(timezone.now())),
        "hides": alert.hides.all()[:PER_PAGE],
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
        operation = fixes.do(request.principal, alert)
    except (Busy, CannotPlan) as error:
        messages.error(request, str(error))
        return redirect("alert", alert_id)
    return redirect("operation", operation.pk)


def _complain(request: SignedInRequest, form: Form) -> None:
    for field, errors in form.errors.items():
        messages.error(request, f"{field}: {' '.join(map(str, errors))}")


# Silences


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
        "may_add": bool(
            request.principal.on_platform(Role.ON_CALL) or request.principal.orgs_where(Role.ON_CALL)
        ),
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


# Rules and their thresholds


@require_safe
@signed_in
def list_rules(request: SignedInRequest) -> HttpResponse:
    evaluated, current = Evaluation.objects.in_bulk(), limits.for_all()
    context = {
        "rules": [(rule, current[rule.slug], evaluated.get(rule.slug)) for rule in RULES],
        "evaluator": services.Evaluator.now(),
    }
    return render(request, "alerts/rules.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
def show_rule(request: SignedInRequest, slug: str) -> HttpResponse:
    """Its thresholds for all, or with `?org=` for an org."""
    rule, principal = limits.get_rule(slug), request.principal
    org = limits.org_of(principal, rule, request.GET.get("org", ""))
    current = limits.get(rule, org)
    inherited = limits.inherited(rule, org)
    initial = {**current.values, "enabled": current.enabled}
    form = ThresholdsForm(request.POST or None, rule=rule, inherited=inherited, initial=initial)
    if request.method == "POST":
        with transaction.atomic():
            fresh = limits.thresholds_for_change(principal, rule, org.slug if org else "")
            if form.is_valid():
                values = form.cleaned_data
                limits.set_thresholds(
                    principal,
                    fresh,
                    values=form.values,
                    enabled=values["enabled"],
                    reason=values["reason"],
                )
                messages.success(request, "Saved. It holds from the next evaluation on, in seconds.")
                return redirect(request.get_full_path())
            transaction.set_rollback(True)
    context = {
        "rule": rule,
        "org": org,
        "current": current,
        "limits": limits.told(rule, current, limits.get(rule, None)),
        "form": form if limits.may_change(principal, org) else None,
        "orgs": visible_orgs(principal) if rule.per_org else [],
        "runbook": runbooks.rendered(rule.runbook),
        "entries": _entries_of(principal, rule.slug, org),
    }
    return render(request, "alerts/rule.html", context)


def _entries_of(principal: Principal, slug: str, org: Org | None) -> Any:
    object_id = f"{slug}/{org.slug}" if org else slug
    entries = visible_entries(principal).filter(object_type="thresholds", object_id=object_id)
    return entries[:10]


# Channels


@require_safe
@signed_in
def list_channels(request: SignedInRequest) -> HttpResponse:
    context = {
        "channels": channels.with_counts(channels.visible_channels(request.principal)),
        "may_add": request.principal.on_platform(Role.PLATFORM_ADMIN),
    }
    return render(request, "alerts/channels.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
def new_channel(request: SignedInRequest) -> HttpResponse:
    request.principal.check_platform(Role.PLATFORM_ADMIN)
    form = NewChannelForm(request.POST or None, orgs=visible_orgs(request.principal))
    if request.method == "POST" and form.is_valid():
        try:
            channel = channels.create_channel(request.principal, **form.cleaned_data)
        except ValidationError as error:
            _add_errors(form, error)
        else:
            messages.success(request, f"{channel.name} is there. Press “Send a test” now.")
            return redirect("alert-channel", channel.pk)
    return render(request, "alerts/channel_new.html", {"form": form})


@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
def show_channel(request: SignedInRequest, channel_id: int) -> HttpResponse:
    channel = channels.get_channel(request.principal, channel_id)
    may_change = request.principal.on_platform(Role.PLATFORM_ADMIN)
    form = ChannelForm(request.POST or None, orgs=[], initial=_initial(channel))
    if request.method == "POST":
        with transaction.atomic():
            fresh = channels.for_change(request.principal, channel_id)
            if form.is_valid():
                try:
                    channels.update_channel(request.principal, fresh, **form.cleaned_data)
                except ValidationError as error:
                    _add_errors(form, error)
                    transaction.set_rollback(True)
                else:
                    messages.success(request, f"{fresh.name} is saved.")
                    return redirect("alert-channel", channel_id)
    context = {
        "channel": channel,
        "log": channel.notifications.select_related("alert")[:LOG_ROWS],
        "form": form,
        "may_change": may_change,
    }
    return render(request, "alerts/channel.html", context)


def _initial(channel: Channel) -> dict[str, Any]:
    names = ("name", "least_severity", "matchers", "tells_end", "enabled")
    return {name: getattr(channel, name) for name in names}


def _add_errors(form: Form, error: ValidationError) -> None:
    for field, details in error.message_dict.items():
        form.add_error(field if field in form.fields else None, details)


@require_POST
@signed_in
def send_test(request: SignedInRequest, channel_id: int) -> HttpResponse:
    test = channels.send_test(request.principal, channel_id)
    tell = messages.success if test.state == test.State.SENT else messages.error
    tell(request, f"{test.get_state_display()}: {test.answer}")
    return redirect("alert-channel", channel_id)


@require_POST
@signed_in
def delete_channel(request: SignedInRequest, channel_id: int) -> HttpResponse:
    with transaction.atomic():
        channel = channels.for_change(request.principal, channel_id)
        channels.delete_channel(request.principal, channel)
    messages.success(request, f"{channel.name} is deleted.")
    return redirect("alert-channels")
