"""Pages of what runs: jobs, moves, restoring rails, drains and upgrades of nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.accounts.forms import ReasonMixin
from console.accounts.roles import Role
from console.fleet.nodes import Impossible
from console.fleet.services import check_fleet, get, visible_nodes
from console.operations.models import Operation
from console.operations.services import Busy, StalePlan
from console.placement import sentences
from console.placement.topology import Misconfigured
from console.sessions import services
from console.sessions.changes import box_drains, drains, jobs, moves
from console.sessions.pages.forms import DrainBoxForm, DrainForm, JobForm, MoveForm, UpgradeForm
from console.sessions.pages.sessions import asked, planned, previewed
from console.sessions.plans.proposals import CannotPlan, Proposal
from console.shell.pages import Telling, show_faults
from console.visibility import sees_fleet


@form_page
def start_job(request: SignedInRequest, name: str) -> HttpResponse:
    session = services.get_session(request.principal, name, Role.ORG_ADMIN)
    form = JobForm(
        request.POST or None,
        drivers=services.usable_drivers(request.principal),
        are_named=sees_fleet(request.principal),
    )

    def begin() -> Operation:
        values = form.cleaned_data
        return jobs.start_job(
            request.principal,
            services.for_change(request.principal, name),
            values["name"],
            values["driver"],
            values["boxes"],
            orgs=values["orgs"],
            **asked(form),
        )

    def plan() -> Proposal:
        values = form.cleaned_data
        jobs.check_new_job(request.principal, session, values["name"], values["driver"], values["orgs"])
        jobs.check_may_start(session, values["name"])
        return jobs.plan_job(session, values["name"], values["driver"], values["boxes"])

    context = {"form": form, "session": session, "sees_fleet": sees_fleet(request.principal)}
    return planned(request, form, plan, begin, "sessions/new_job.html", context)


@post_page
def end_job(request: SignedInRequest, name: str, job: str) -> HttpResponse:
    def begin() -> Operation:
        session = services.for_change(request.principal, name)
        return jobs.end_job(request.principal, session, job)

    return _begun(request, begin, "session", name)


@post_page
def move(request: SignedInRequest, name: str) -> HttpResponse:
    session = services.get_session(request.principal, name, Role.ON_CALL)
    form = MoveForm(
        request.POST,
        streams=[stream.name for stream in services.streams_of(session)],
        nodes=services.reachable_nodes(request.principal, session),
    )
    if not form.is_valid():
        messages.error(request, "Select a stream of this session and a ready node.")
        return redirect("session", name)

    def begin() -> Operation:
        locked = services.for_change(request.principal, name, Role.ON_CALL)
        values = form.cleaned_data
        stream = services.get_stream(locked, values["stream"])
        return moves.move(request.principal, locked, stream, values["node"], reason=values["reason"])

    return _begun(request, begin, "session", name)


@form_page
def restore_rails(request: SignedInRequest, name: str) -> HttpResponse:
    session = services.get_session(request.principal, name, Role.ON_CALL)
    form = ReasonMixin(request.POST or None)
    if request.method == "POST" and form.is_valid():

        def begin() -> Operation:
            locked = services.for_change(request.principal, name, Role.ON_CALL)
            return moves.restore_rails(request.principal, locked, reason=form.cleaned_data["reason"])

        return _begun(request, begin, "session", name)
    found = moves.plan_rails(session)
    context = {
        "session": session,
        "form": form,
        "found": found,
        "summary": moves.sentence_of(session, found),
        "left": [sentences.placed(one, named=sees_fleet(request.principal)) for one in found.left[:20]],
    }
    return render(request, "sessions/restore_rails.html", context)


@form_page
def drain(request: SignedInRequest, name: str) -> HttpResponse:
    check_fleet(request.principal, Role.ON_CALL)
    node = get(visible_nodes(request.principal), name)
    form = DrainForm(request.POST if request.method == "POST" else None)

    def ignores() -> bool:
        return bool(form.cleaned_data["ignore_redundancy"])

    def look() -> dict[str, Any]:
        return {"plan": drains.check_drain(request.principal, name, ignore_redundancy=ignores())}

    def begin() -> Operation:
        return drains.drain(request.principal, name, **form.cleaned_data)

    context = {"form": form, "node": node, "tab": "nodes"}
    return previewed(
        request, form, look, begin, "sessions/drain.html", "sessions/drain_plan.html", context
    )


@post_page
def upgrade(request: SignedInRequest, name: str) -> HttpResponse:
    form = UpgradeForm(request.POST)
    if form.is_valid():
        return _begun(
            request,
            lambda: drains.upgrade(request.principal, name, **form.cleaned_data),
            "fleet-node",
            name,
        )
    show_faults(request, form)
    return redirect("fleet-node", name)


@post_page
def drain_box(request: SignedInRequest, name: str) -> HttpResponse:
    form = DrainBoxForm(request.POST)
    reason = form.cleaned_data["reason"] if form.is_valid() else ""
    return _begun(
        request, lambda: box_drains.drain(request.principal, name, reason=reason), "fleet-box", name
    )


def _begun(
    request: SignedInRequest, begin: Callable[[], Operation], back: str, name: str
) -> HttpResponse:
    """To the operation; or back, with why there is none."""
    refusals = (CannotPlan, Impossible, Misconfigured, StalePlan, Busy, ValidationError)
    with Telling(request, *refusals), transaction.atomic():
        return redirect("operation", begin().pk)
    return redirect(back, name)
