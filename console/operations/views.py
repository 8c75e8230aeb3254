from __future__ import annotations

from uuid import UUID

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from console.accounts.browser import SignedInRequest, post_page, read_page
from console.operations import services
from console.operations.core import State
from console.operations.machines import is_known, machine_of
from console.operations.models import Operation
from console.shell.pages import Telling, paged, render_live
from console.visibility import without_places

PAGES = {"session": "session", "node": "fleet-node", "box": "fleet-box", "org": "org"}


class FilterForm(forms.Form):
    target = forms.CharField(max_length=120, required=False, label="Target", help_text="session:chat")
    kind = forms.CharField(max_length=48, required=False, label="Kind")
    done = forms.NullBooleanField(
        required=False,
        label="State",
        widget=forms.Select(choices=[("", "all"), ("false", "running"), ("true", "ended")]),
    )


@read_page
def list_operations(request: SignedInRequest) -> HttpResponse:
    form = FilterForm(request.GET)
    values = form.cleaned_data if form.is_valid() else {}
    found = services.filtered(services.visible_operations(request.principal), **values)
    context = {**paged(request, found), "form": form}
    for one in context["page"]:
        without_places(request.principal, one)
    return render_live(request, "operations/list", context)


@read_page
def show_operation(request: SignedInRequest, operation_id: UUID) -> HttpResponse:
    operation = services.get_operation(request.principal, operation_id)
    operation = without_places(request.principal, operation)
    context = {
        "operation": operation,
        "target_page": _target_page(operation),
        "steps": _steps(operation),
        **_actions(request, operation),
    }
    return render_live(request, "operations/operation", context)


def _actions(request: SignedInRequest, operation: Operation) -> dict[str, bool]:
    """What somebody may do with it now. Of a kind that this version does not know, nothing."""
    may_change = services.may_change(request.principal, operation) and is_known(operation.kind)
    is_stuck = operation.state == State.STUCK
    going_on = may_change and not operation.cancel_requested
    return {
        "is_stuck": is_stuck,
        "may_retry": may_change and is_stuck,
        "may_cancel": going_on and services.can_go_back(operation),
    }


@post_page
def cancel(request: SignedInRequest, operation_id: UUID) -> HttpResponse:
    with Telling(request, services.CannotCancel):
        operation = services.cancel(request.principal, operation_id)
        if operation.done:
            messages.info(request, "The operation had already ended.")
        else:
            messages.success(request, "Cancellation requested.")
    return redirect("operation", operation_id)


@post_page
def retry(request: SignedInRequest, operation_id: UUID) -> HttpResponse:
    with Telling(request, services.CannotRetry):
        services.retry(request.principal, operation_id)
        messages.success(request, "Retrying.")
    return redirect("operation", operation_id)


def _target_page(operation: Operation) -> str:
    """Where what it works on is shown; empty where it has no page."""
    kind, _, name = operation.topic.partition(":")
    return reverse(PAGES[kind], args=[name]) if kind in PAGES else ""


def _steps(operation: Operation) -> list[tuple[str, str, str]]:
    """For each step: its sentence, the kind of its status, and the status in words."""
    if not is_known(operation.kind):
        return []  # of another version of the console
    steps = machine_of(operation.kind).steps
    return [(step.sentence, *_status(operation, number)) for number, step in enumerate(steps)]


def _status(operation: Operation, number: int) -> tuple[str, str]:
    """What is as before was taken back, or never begun: afterwards nobody can tell, or needs to."""
    here = number == operation.step
    match State(operation.state):
        case State.SUCCEEDED:
            return "ok", "done"
        case State.FAILED | State.CANCELLED:
            return "off", "as before"
        case State.STUCK if here:
            return "bad", "stuck"
    going_back = operation.error is not None
    if here:
        return ("warn", "being taken back") if going_back else ("warn", "now")
    if number < operation.step:
        return "ok", "done"
    return ("off", "as before") if going_back else ("off", "to do")
