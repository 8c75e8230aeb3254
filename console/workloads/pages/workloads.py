"""Workloads as pages: the list, one of them live, its revisions and instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, post_page, read_page
from console.accounts.forms import ReasonMixin
from console.accounts.roles import Role
from console.audit.diff import changes as changes_between
from console.fleet.nodes import Impossible
from console.shell.pages import Telling, paged, render_live, show_faults
from console.visibility import sees_fleet
from console.workloads import changes, looks, services
from console.workloads import spec as specs
from console.workloads.models import SEEN_SECONDS, Instance, Revision, Rollout, RolloutPhase, Workload
from console.workloads.pages.forms import DeleteForm, FilterForm, UndoForm
from telemetry.events import events_of

RECENT = 10
LOG_LINES = 100
LOG_SECONDS = 2.0  # a page does not wait longer for them
INSTANCES_SHOWN = 100
STALE_SECONDS = 2 * SEEN_SECONDS  # below that an instance may just have had no news
BROKEN = (RolloutPhase.FAILED, RolloutPhase.UNDONE)


@read_page
def list_workloads(request: SignedInRequest) -> HttpResponse:
    form = FilterForm(request.GET)
    values = form.cleaned_data if form.is_valid() else {}
    found = services.filtered(services.visible_workloads(request.principal), **values)
    context = {
        **paged(request, found.order_by("name")),
        "form": form,
        "may_add": services.may_add(request.principal),
        "shares": request.principal.on_platform(Role.PLATFORM_ADMIN),
    }
    context["rows"] = [
        (workload, looks.of_workload(workload), _rollout_of(workload)) for workload in context["page"]
    ]
    return render_live(request, "workloads/list", context)


def _rollout_of(workload: Workload) -> str:
    if rollout := workload.rollout_read:
        phase = RolloutPhase(rollout["phase"]).label
        return f"{phase}, {rollout['switched']} of {rollout['total']}"
    return "rollouts paused" if workload.paused else ""


@read_page
def show_workload(request: SignedInRequest, name: str) -> HttpResponse:
    principal = request.principal
    workload = services.get_workload(principal, name)
    live = list(services.instances_of(workload, ended=False).order_by("ordinal", "pk"))
    ended = services.instances_of(workload, ended=True).order_by("-ended_at")[:RECENT]
    rollouts = list(
        workload.rollouts.select_related("from_revision", "to_revision").order_by("-pk")[:RECENT]
    )
    context = {
        "workload": workload,
        "look": looks.of_workload(workload),
        "spec": workload.spec(),
        "topic": workload.topic,
        "conditions": [(one, looks.of_condition(one)) for one in services.conditions_of(workload)],
        "rows": _rows(workload, live),
        "stale_seconds": STALE_SECONDS,
        "ended": [(one, looks.of_instance(one)) for one in ended],
        "rollout": next((one for one in rollouts if one.ended_at is None), None),
        "rollouts": [(one, looks.of_rollout(one)) for one in rollouts],
        "rules": workload.rollout,
        **_compared_traffic(rollouts),
        "revisions": _revisions(workload),
        "events": events_of(workload.topic).order_by("-at", "-id")[:RECENT],
        "sees_fleet": sees_fleet(principal),
        "may_change": principal.holds(Role.ORG_ADMIN, workload.org_id) and not workload.deleting,
        "may_act": principal.holds(Role.ON_CALL, workload.org_id) and not workload.deleting,
        "delete_form": DeleteForm(auto_id="delete_%s"),
    }
    return render_live(request, "workloads/workload", context)


def _compared_traffic(rollouts: list[Rollout]) -> dict[str, Any]:
    """By which the last one was judged."""
    found = next((one for one in rollouts if one.traffic), None)
    if found is None or found.traffic is None:
        return {}
    before = found.from_revision.number if found.from_revision else "before"
    sides = [(found.to_revision.number, found.traffic["new"]), (before, found.traffic["old"])]
    return {"compared": found, "compared_traffic": sides}


@dataclass(frozen=True, slots=True)
class Row:
    """A replica, and one of its instances, or none yet."""

    replica: str
    instance: Instance | None
    look: looks.Look
    is_leaving: bool


def _rows(workload: Workload, live: list[Instance]) -> list[Row]:
    """Every replica that is wanted, and those that still have instances."""
    by_ordinal: dict[int, list[Instance]] = {}
    for instance in live[:INSTANCES_SHOWN]:
        by_ordinal.setdefault(instance.ordinal, []).append(instance)
    wanted = range(min(workload.replicas, INSTANCES_SHOWN))
    rows = []
    for ordinal in sorted({*wanted, *by_ordinal}):
        replica = f"{workload.name}-{ordinal}"
        is_leaving = ordinal >= workload.replicas
        here = by_ordinal.get(ordinal, [])
        rows += [Row(replica, one, looks.of_instance(one), is_leaving) for one in here]
        if ordinal not in by_ordinal:
            rows.append(Row(replica, None, looks.Look("off", "no instance yet"), is_leaving))
    return rows


def _revisions(workload: Workload) -> list[tuple[Revision, list[str], str, str]]:
    """The latest, each with the fields by which it differs from the one before, what its rollout came to
    if that was nothing, and what is asked before one rolls back to it."""
    found = list(services.revisions_of(workload)[: RECENT + 1])
    before = {one.number: one for one in found}
    rollouts = Rollout.objects.filter(to_revision__in=found).order_by("pk")
    last = {one.to_revision_id: one for one in rollouts}
    rows = []
    for one in found[:RECENT]:
        fields = [path for path, *_ in _changed(before.get(one.number - 1), one)]
        question, broken = f"Roll {workload.name} back to revision {one.number}?", ""
        if (rollout := last.get(one.pk)) and rollout.phase in BROKEN:
            broken = str(RolloutPhase(rollout.phase).label)
            question += f" Its rollout was {broken}: {rollout.sentence}"
        rows.append((one, fields, broken, question))
    return rows


def _changed(before: Revision | None, after: Revision) -> list[tuple[str, Any, Any]]:
    if before is None:
        return []
    return changes_between(_values(before), _values(after))


def _values(revision: Revision, *, is_masked: bool = False) -> Mapping[str, Any]:
    found = revision.template_shown()
    return specs.masked(found) if is_masked else found


@read_page
def show_revision(request: SignedInRequest, name: str, number: int) -> HttpResponse:
    workload = services.get_workload(request.principal, name)
    revision = services.get_revision(workload, number)
    other = _compared(workload, revision, request.GET.get("with", ""))
    is_masked = not request.principal.holds(Role.ORG_ADMIN, workload.org_id)
    values = _values(revision, is_masked=is_masked)
    context = {
        "workload": workload,
        "revision": revision,
        "other": other,
        "numbers": services.revisions_of(workload).values_list("number", flat=True)[:200],
        "differences": changes_between(_values(other, is_masked=is_masked), values) if other else [],
        "text": specs.as_yaml(values),
        "is_current": revision.pk == workload.revision_id,
        "is_stable": revision.pk == workload.stable_id,
        "may_act": request.principal.holds(Role.ON_CALL, workload.org_id) and not workload.deleting,
    }
    return render(request, "workloads/revision.html", context)


def _compared(workload: Workload, revision: Revision, text: str) -> Revision | None:
    """The one that was chosen, or else the one before."""
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return services.get_revision(workload, int(text))
    return services.revisions_of(workload).filter(number__lt=revision.number).first()


@read_page
def show_instance(request: SignedInRequest, name: str, instance: str) -> HttpResponse:
    workload = services.get_workload(request.principal, name)
    found = services.get_instance(workload, instance)
    context = {
        "workload": workload,
        "instance": found,
        "look": looks.of_instance(found),
        "stale_seconds": STALE_SECONDS,
        "topic": workload.topic,
        **_log(found),
    }
    return render_live(request, "workloads/instance", context)


def _log(instance: Instance) -> dict[str, Any]:
    """The last lines of its log, and since when that is so; or why there are none."""
    from console.workloads import logs  # with gRPC, which pages need for nothing else

    try:
        text = logs.tail(instance.name, LOG_LINES, seconds=LOG_SECONDS)
    except (Http404, logs.NoLog) as error:
        return {"log_missing": str(error)}
    return {"log": text.decode(errors="replace"), "log_read_at": timezone.now(), "log_lines": LOG_LINES}


# Buttons


@post_page
def restart_workload(request: SignedInRequest, name: str) -> HttpResponse:
    return _act(request, name, changes.restart, "Restarting: replicas are replaced one after the other.")


@post_page
def pause_workload(request: SignedInRequest, name: str) -> HttpResponse:
    return _act(request, name, changes.pause, "Rollouts are paused.")


@post_page
def resume_workload(request: SignedInRequest, name: str) -> HttpResponse:
    return _act(request, name, changes.resume, "Rollouts are resumed.")


def _act(
    request: SignedInRequest, name: str, change: Callable[..., Workload], done: str
) -> HttpResponse:
    form = ReasonMixin(request.POST)
    with Telling(request, Impossible), transaction.atomic():
        workload = services.for_change(request.principal, name, Role.ON_CALL)
        if form.is_valid():
            change(request.principal, workload, reason=form.cleaned_data["reason"])
            messages.success(request, done)
        else:
            show_faults(request, form)
    return redirect("workload", name)


@post_page
def undo_workload(request: SignedInRequest, name: str) -> HttpResponse:
    form = UndoForm(request.POST)
    with Telling(request, Impossible), transaction.atomic():
        workload = services.for_change(request.principal, name, Role.ON_CALL)
        if form.is_valid():
            number, reason = form.cleaned_data["revision"], form.cleaned_data["reason"]
            changes.roll_back(request.principal, workload, number, reason=reason)
            made = workload.revision
            messages.success(
                request,
                f"Rolling back: revision {made.number} equals revision {made.same_as}." if made else "",
            )
        else:
            show_faults(request, form)
    return redirect("workload", name)


@post_page
def delete_workload(request: SignedInRequest, name: str) -> HttpResponse:
    form = DeleteForm(request.POST)
    with Telling(request, Impossible), transaction.atomic():
        workload = services.for_change(request.principal, name)
        if form.is_valid() and form.cleaned_data["typed"] == name:
            changes.delete(request.principal, workload, reason=form.cleaned_data["reason"])
            messages.success(request, f"{name} is being deleted: its instances finish their requests.")
        else:
            messages.error(request, f"Not deleted: type “{name}” to confirm.")
    return redirect("workload", name)
