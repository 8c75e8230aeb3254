from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from console.accounts.browser import SignedInRequest, signed_in
from console.operations import services
from console.operations.core import State
from console.operations.forms import FilterForm
from console.operations.machines import is_known, machine_of
from console.operations.models import Operation
from console.visibility import without_places

PER_PAGE = 50
PAGES = {"session": "session", "node": "fleet-node", "org": "org"}


@require_safe
@signed_in
def list_operations(request: SignedInRequest) -> HttpResponse:
    form = FilterForm(request.GET)
    values = form.cleaned_data if form.is_valid() else {}
    found = services.filtered(services.visible_operations(request.principal), **values)
    page = Paginator(found, PER_PAGE).get_page(request.GET.get("page"))
    for one in page:
        without_places(request.principal, one)
    query = request.GET.copy()
    query.pop("page", None)
    filtered = any(value for value in query.values())
    context = {"form": form, "page": page, "query": query.urlencode(), "filtered": filtered}
    fragment = request.headers.get("HX-Request") == "true"
    return render(request, "operations/list_live.html" if fragment else "operations/list.html", context)


@require_safe
@signed_in
def show_operation(request: SignedInRequest, operation_id: UUID) -> HttpResponse:
    operation = services.get_operation(request.principal, operation_id)
    operation = without_places(request.principal, operation)
    context = {
        "operation": operation,
        "target_page": _target_page(operation),
        "steps": _steps(operation),
        **_actions(request, operation),
    }
    fragment = request.headers.get("HX-Request") == "true"
    return render(
        request, "operations/operation_live.html" if fragment else "operations/operation.html", context
    )


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


@require_POST
@signed_in
def cancel(request: SignedInRequest, operation_id: UUID) -> HttpResponse:
    operation = services.cancel(request.principal, operation_id)
    if operation.done:
        messages.info(request, "The operation had already ended.")
    else:
        messages.success(request, "Cancellation requested.")
    return redirect("operation", operation_id)


@require_POST
@signed_in
def retry(request: SignedInRequest, operation_id: UUID) -> HttpResponse:
    try:
        services.retry(request.principal, operation_id)
    except services.NotStuck as error:
        messages.error(request, str(error))
    else:
        messages.success(request, "Retrying.")
    return redirect("operation", operation_id)


def _target_page(operation: Operation) -> str:
    """Where what it works on is shown; empty where it has no page."""
    kind, _, name = operation.target.partition(":")
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
