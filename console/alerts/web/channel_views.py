"""Pages of channels."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page, read_page
from console.accounts.roles import Role
from console.alerts.delivery import channels
from console.alerts.models import Channel
from console.alerts.web.forms import ChangedChannelForm, NewChannelForm
from console.orgs.services import visible_orgs
from console.shell.pages import Refusing, check_version

LOG_ROWS = 50


@read_page
def list_channels(request: SignedInRequest) -> HttpResponse:
    context = {
        "channels": channels.with_counts(channels.visible_channels(request.principal)),
        "may_add": request.principal.on_platform(Role.PLATFORM_ADMIN),
    }
    return render(request, "alerts/channels.html", context)


@form_page
def new_channel(request: SignedInRequest) -> HttpResponse:
    request.principal.check_platform(Role.PLATFORM_ADMIN)
    form = NewChannelForm(request.POST or None, orgs=visible_orgs(request.principal))
    if request.method == "POST" and form.is_valid():
        with Refusing(form, ValidationError):
            channel = channels.create_channel(request.principal, **form.cleaned_data)
            messages.success(request, f"{channel.name} is created. Press “Send test” to check it.")
            return redirect("alert-channel", channel.pk)
    return render(request, "alerts/channel_new.html", {"form": form})


@form_page
def show_channel(request: SignedInRequest, channel_id: int) -> HttpResponse:
    channel = channels.get_channel(request.principal, channel_id)
    may_change = request.principal.on_platform(Role.PLATFORM_ADMIN)
    form = ChangedChannelForm(request.POST or None, orgs=[], initial=_initial(channel))
    if request.method == "POST":
        with transaction.atomic():
            fresh = channels.for_change(request.principal, channel_id)
            with Refusing(form, ValidationError):
                if form.is_valid():
                    check_version(form, fresh.version)
                    channels.update_channel(request.principal, fresh, **form.cleaned_data)
                    messages.success(request, f"{fresh.name} is saved.")
                    return redirect("alert-channel", channel_id)
            transaction.set_rollback(True)
    context = {
        "channel": channel,
        "log": channel.notifications.select_related("alert")[:LOG_ROWS],
        "form": form,
        "may_change": may_change,
    }
    return render(request, "alerts/channel.html", context)


def _initial(channel: Channel) -> dict[str, Any]:
    names = ("name", "min_severity", "matchers", "send_resolved", "enabled", "version")
    return {name: getattr(channel, name) for name in names}


@post_page
def send_test(request: SignedInRequest, channel_id: int) -> HttpResponse:
    test = channels.send_test(request.principal, channel_id)
    notify = messages.success if test.state == test.State.SENT else messages.error
    notify(request, f"{test.get_state_display()}: {test.answer}")
    return redirect("alert-channel", channel_id)


@post_page
def delete_channel(request: SignedInRequest, channel_id: int) -> HttpResponse:
    with transaction.atomic():
        channel = channels.for_change(request.principal, channel_id)
        channels.delete_channel(request.principal, channel)
    messages.success(request, f"{channel.name} is deleted.")
    return redirect("alert-channels")
