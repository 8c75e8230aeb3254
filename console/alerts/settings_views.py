"""Pages of rules, their thresholds, and channels."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.forms import Form
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from console.accounts.browser import SignedInRequest, signed_in
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts import channels, limits, runbooks, services
from console.alerts.catalogue import RULES
from console.alerts.forms import (
    ChannelForm,
    NewChannelForm,
    ThresholdsForm,
)
from console.alerts.models import Channel, Evaluation
from console.audit.services import visible_entries
from console.orgs.models import Org
from console.orgs.services import visible_orgs

LOG_ROWS = 50


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
