from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, form_page, post_page, read_page
from console.accounts.forms import ReasonMixin
from console.accounts.roles import Role
from console.fleet.models import Node
from console.fleet.nodes import Impossible
from console.operations.models import Operation
from console.operations.services import Busy, StalePlan, running_within
from console.orgs.models import Org
from console.orgs.services import visible_orgs
from console.placement.topology import Misconfigured, State, Tier
from console.sessions import diagram, redundancy, services
from console.sessions import rules as session_rules
from console.sessions.changes import sizes
from console.sessions.memory import memory_of
from console.sessions.models import Session, Stream
from console.sessions.pages.forms import (
    DeleteForm,
    FilterForm,
    MoveForm,
    NewSessionForm,
    PlannedForm,
    ResizeForm,
)
from console.sessions.plans.holders import without_count
from console.sessions.plans.losses import Verdict
from console.sessions.plans.proposals import CannotPlan, Proposal
from console.shell.pages import Telling, check_version, paged, render_live, sentence_of, wants_part
from console.visibility import Sight, sees_fleet, without_places
from telemetry.events import events_of
from telemetry.topics import of_session

RECENT = 10
STREAMS_SHOWN_MAX = 200
OPERATIONS_SHOWN_MAX = 20
LEVELS = {Verdict.BLOCKED.value: "error", Verdict.REPLACED.value: "info"}  # of the message of a loss

Plan = Callable[[], Proposal]
Begin = Callable[[], Operation]


@read_page
def list_sessions(request: SignedInRequest) -> HttpResponse:
    form = FilterForm(request.GET)
    values = form.cleaned_data if form.is_valid() else {}
    found = services.filtered(services.visible_sessions(request.principal), **values).order_by("name")
    context = {**paged(request, found), "form": form, "may_add": any(_orgs_for_new(request))}
    context["rows"] = [(session, services.sizes(session)) for session in context["page"]]
    return render_live(request, "sessions/list", context)


@read_page
def show_session(request: SignedInRequest, name: str) -> HttpResponse:
    session = services.get_session(request.principal, name)
    topic = of_session(name)
    sight = Sight(request.principal)
    streams = list(services.streams_of(session)[: STREAMS_SHOWN_MAX + 1])
    for stream in streams:
        stream.why = sight.why(stream.why)
    rules = session_rules.effective_rules(session.org, session.path)
    kept = redundancy.kept_by(session, rules.redundancy)
    context = {
        "session": session,
        "size": services.sizes(session),
        "topic": topic,
        "rules": rules,
        "redundancy_kept": kept,
        "why_not_kept": kept
        and (kept.why if sees_fleet(request.principal) else without_count(kept.why)),
        "operations": _running(request, session),
        "losses": [(loss, LEVELS.get(loss.verdict, "warning")) for loss in session.losses.all()],
        "workload": services.workload_of(session),
        "jobs": services.jobs_of(session),
        "memory": memory_of(request.principal, session, timezone.now()),
        "streams": streams[:STREAMS_SHOWN_MAX],
        "more_streams": len(streams) > STREAMS_SHOWN_MAX,
        "off_rails": services.streams_of(session).filter(operation=None).exclude(tier=Tier.RAIL).count(),
        "picture": diagram.draw([_drawn(stream) for stream in streams]),
        "events": events_of(topic).order_by("-at", "-id")[:RECENT],
        "sees_fleet": request.principal.on_platform(Role.VIEWER),
        "may_change": request.principal.holds(Role.ORG_ADMIN, session.org_id),
        "may_move": request.principal.holds(Role.ON_CALL, session.org_id),
        "move_form": MoveForm(
            streams=[stream.name for stream in streams],
            nodes=Node.objects.none(),  # its name is typed
        ),
        "nodes_ready": _nodes_ready() if request.principal.on_platform(Role.VIEWER) else (),
    }
    return render_live(request, "sessions/session", context)


def _running(request: SignedInRequest, session: Session) -> list[Operation]:
    """Those on it and on its jobs. Those on lost nodes are shown with their loss."""
    of_losses = [loss.operation_id for loss in session.losses.all() if loss.operation_id]
    found = running_within(of_session(session.name)).exclude(pk__in=of_losses)
    return [without_places(request.principal, one) for one in found[:OPERATIONS_SHOWN_MAX]]


def _nodes_ready() -> Iterable[str]:
    """For whom there is a fleet. Others move streams to nodes that they are told of."""
    return Node.objects.filter(state=State.READY.value).values_list("name", flat=True)


def _drawn(stream: Stream) -> diagram.StreamEnds:
    node = stream.next_node if stream.next_node is not None else stream.node
    tier = stream.next_tier if stream.next_tier is not None else stream.tier
    return diagram.StreamEnds(
        stream.name, stream.box.name, stream.domain, node.name, Tier(tier).name.lower()
    )


@form_page
def new_session(request: SignedInRequest) -> HttpResponse:
    may_share, orgs = _orgs_for_new(request)
    if not may_share and not orgs:
        request.principal.check_platform(Role.PLATFORM_ADMIN)
    choice = visible_orgs(request.principal).filter(pk__in=orgs) if not may_share else Org.objects.all()
    form = NewSessionForm(request.POST or None, orgs=choice, may_share=may_share)

    def made() -> Session:
        values = form.cleaned_data
        services.check_may_create(request.principal, values["org"])
        return sizes.new_session(
            values["name"],
            values["org"],
            values["boxes"],
            path=values["path"],
            bytes_per_token=values["kib_per_token"] << 10,
        )

    def begin() -> Operation:
        return sizes.create(request.principal, made(), **asked(form))

    def plan() -> Proposal:
        return sizes.plan_size(made(), form.cleaned_data["boxes"])

    return planned(request, form, plan, begin, "sessions/new.html", {"form": form})


@form_page
def resize_session(request: SignedInRequest, name: str) -> HttpResponse:
    session = services.get_session(request.principal, name, Role.ORG_ADMIN)
    initial = {"boxes": session.boxes_desired, "version": session.version}
    form = ResizeForm(request.POST or None, initial=initial)

    def begin() -> Operation:
        locked = services.for_change(request.principal, name)
        check_version(form, locked.version)
        sizes.check_by_hand(locked, form.cleaned_data["boxes"])
        return sizes.resize(request.principal, locked, form.cleaned_data["boxes"], **asked(form))

    def plan() -> Proposal:
        return sizes.plan_resize(session, form.cleaned_data["boxes"])

    context = {
        "form": form,
        "session": session,
        "size": services.sizes(session),
        "workload": services.workload_of(session),
        "delete_form": DeleteForm(auto_id="delete_%s"),
        "rules": session_rules.effective_rules(session.org, session.path),
    }
    return planned(request, form, plan, begin, "sessions/resize.html", context)


@post_page
def delete_session(request: SignedInRequest, name: str) -> HttpResponse:
    form = DeleteForm(request.POST)
    with Telling(request, Busy, Impossible), transaction.atomic():
        session = services.for_change(request.principal, name)
        if form.is_valid() and form.cleaned_data.pop("typed") == name:
            return redirect(
                "operation", sizes.delete(request.principal, session, **form.cleaned_data).pk
            )
        messages.error(request, f"Not deleted: type “{name}” to confirm.")
    return redirect("session-resize", name)


def asked(form: PlannedForm) -> dict[str, Any]:
    values = form.cleaned_data
    return {
        "wait_seconds": values["wait_minutes"] * 60,
        "plan_token": values["plan_token"] or None,
        "reason": values["reason"],
    }


def planned(
    request: SignedInRequest,
    form: PlannedForm,
    plan: Plan,
    begin: Begin,
    template: str,
    context: dict[str, Any],
) -> HttpResponse:
    """A form with the plan of a session beside it."""

    def look() -> dict[str, Any]:
        return shown(plan(), Sight(request.principal))

    return previewed(request, form, look, begin, template, "sessions/plan.html", context)


def previewed(
    request: SignedInRequest,
    form: ReasonMixin,
    look: Callable[[], dict[str, Any]],
    begin: Begin,
    template: str,
    part: str,
    context: dict[str, Any],
) -> HttpResponse:
    """A form with what it would do beside it, which `part` shows: asked for by a script while somebody
    types, or by its button; and sent, which begins the operation."""
    wants_plan = "preview" in request.POST or wants_part(request)
    found: dict[str, Any] = {}
    if request.method == "POST" and form.is_valid():
        try:
            with transaction.atomic():
                if not wants_plan:
                    return redirect("operation", begin().pk)
                found = look()
                transaction.set_rollback(True)
        except (CannotPlan, Impossible, Misconfigured, StalePlan, Busy, ValidationError) as error:
            found = {"refused": refusal(error, Sight(request.principal))}
    if wants_part(request):
        return render(request, part, {**found, "form": form})
    return render(request, template, {**context, **found})


def shown(proposal: Proposal, sight: Sight) -> dict[str, Any]:
    """A plan for its template."""
    streams = [
        diagram.StreamEnds(one.name, one.box, one.domain, one.node, one.path) for one in proposal.streams
    ]
    return {
        "plan": proposal,
        "plan_streams": [
            replace(one, why=sight.why(one.why)) for one in proposal.streams[:STREAMS_SHOWN_MAX]
        ],
        "more_streams": len(proposal.streams) > STREAMS_SHOWN_MAX,
        "picture": diagram.draw(streams),
    }


def refusal(error: Exception, sight: Sight) -> dict[str, str]:
    """For people: what it is, and whether waiting helps."""
    if isinstance(error, CannotPlan):
        return {
            "kind": "error" if error.cause.is_never else "warning",
            "when": "Never" if error.cause.is_never else "Not now",
            "sentence": error.with_names if sight.sees_fleet else error.sentence,
        }
    return {"kind": "error", "when": "", "sentence": sentence_of(error)}


def _orgs_for_new(request: SignedInRequest) -> tuple[bool, frozenset[int]]:
    """Whether they may make shared sessions, and in which orgs sessions of its own."""
    principal = request.principal
    return principal.on_platform(Role.PLATFORM_ADMIN), principal.orgs_where(Role.ORG_ADMIN)
