"""Forms with a plan below them: creating, editing and scaling a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.fleet.models import Box
from console.fleet.nodes import Impossible
from console.operations.services import Busy, StalePlan
from console.orgs.services import visible_orgs
from console.placement.topology import Misconfigured
from console.routing.models import ServedModel
from console.sessions.pages.forms import PlannedForm
from console.sessions.pages.sessions import asked, refusal, shown
from console.sessions.plans.proposals import CannotPlan
from console.shell.pages import check_version, wants_part
from console.visibility import Sight
from console.workloads import changes, services
from console.workloads import spec as specs
from console.workloads.models import Workload
from console.workloads.pages.forms import ScaleForm, SpecForm
from console.workloads.plans import Plan
from console.workloads.spec import Wrong

EXAMPLE: Final = """\
name: {name}
{org}model: example/{name}-8b     # what clients send
tokens_max: 32768
engine:
  kind: emulator             # or vllm, sglang, command
replicas: {replicas}
boxes_per_replica: 1
rollout:
  max_surge: 1
  max_unavailable: 0
  deadline_seconds: 10m
"""
REFUSALS: Final = (
    *(CannotPlan, Misconfigured, StalePlan, Busy, ValidationError, Impossible),
    *(PermissionDenied, Http404),
)


@form_page
def new_workload(request: SignedInRequest) -> HttpResponse:
    principal = request.principal
    if not services.may_add(principal):
        principal.check_may_change(Role.PLATFORM_ADMIN)
    form = SpecForm(request.POST or None, initial={"spec": _example(principal)})

    def plan() -> Plan:
        return changes.plan_new(principal, specs.parse(form.cleaned_data["spec"]))

    def begin() -> Workload:
        return changes.create(principal, specs.parse(form.cleaned_data["spec"]), **asked(form))

    return _planned(request, form, plan, begin, "workloads/new.html", {})


def _example(principal: Principal) -> str:
    """For somebody who may create only workloads of an org, with one of theirs."""
    org = ""
    if not principal.on_platform(Role.PLATFORM_ADMIN):
        theirs = visible_orgs(principal).filter(pk__in=principal.orgs_where(Role.ORG_ADMIN)).first()
        org = f"org: {theirs.slug}\n" if theirs else ""
    taken = {one for named in ServedModel.objects.values_list("name", "model") for one in named}
    taken |= set(Workload.objects.values_list("name", flat=True))
    name = next(each for each in _example_names() if not taken & {each, f"example/{each}-8b"})
    return EXAMPLE.format(name=name, org=org, replicas=min(2, max(1, Box.objects.count())))


def _example_names() -> Iterator[str]:
    yield "chat"
    yield from (f"chat-{number}" for number in count(2))


@form_page
def edit_workload(request: SignedInRequest, name: str) -> HttpResponse:
    principal = request.principal
    workload = services.get_workload(principal, name, Role.ORG_ADMIN)
    initial = {"spec": specs.dump(workload.spec()), "version": workload.version}
    form = SpecForm(request.POST or None, initial=initial)

    def plan() -> Plan:
        wanted = specs.parse(form.cleaned_data["spec"])
        return changes.plan_change(principal, _locked(principal, name, form), wanted)

    def begin() -> Workload:
        wanted = specs.parse(form.cleaned_data["spec"])
        return changes.update(principal, _locked(principal, name, form), wanted, **asked(form))

    return _planned(request, form, plan, begin, "workloads/edit.html", {"workload": workload})


@form_page
def scale_workload(request: SignedInRequest, name: str) -> HttpResponse:
    principal = request.principal
    workload = services.get_workload(principal, name, Role.ORG_ADMIN)
    form = ScaleForm(request.POST or None, initial={"replicas": workload.replicas})

    def plan() -> Plan:
        found = services.for_change(principal, name)
        return changes.plan_change(
            principal, found, changes.scaled(found, form.cleaned_data["replicas"])
        )

    def begin() -> Workload:
        found = services.for_change(principal, name)
        wanted = changes.scaled(found, form.cleaned_data["replicas"])
        return changes.update(principal, found, wanted, **asked(form))

    return _planned(request, form, plan, begin, "workloads/scale.html", {"workload": workload})


def _locked(principal: Principal, name: str, form: SpecForm) -> Workload:
    found = services.for_change(principal, name)
    if form.cleaned_data["version"] is not None:
        check_version(form, found.version)
    return found


def _planned(
    request: SignedInRequest,
    form: PlannedForm,
    plan: Callable[[], Plan],
    begin: Callable[[], Workload],
    template: str,
    context: dict[str, Any],
) -> HttpResponse:
    """The plan, while somebody types or by its button; or, sent, the change."""
    wants_plan = "preview" in request.POST or wants_part(request)
    found: dict[str, Any] = {}
    if request.method == "POST" and form.is_valid():
        try:
            with transaction.atomic():
                if not wants_plan:
                    return redirect("workload", begin().name)
                found = _shown(plan(), Sight(request.principal))
                transaction.set_rollback(True)
        except Wrong as error:
            found = {"problems": error.problems}
        except REFUSALS as error:
            found = {"refused": refusal(error, Sight(request.principal))}
    if wants_part(request):
        return render(request, "workloads/plan.html", {**found, "form": form})
    return render(request, template, {**context, **found, "form": form})


def _shown(plan: Plan, sight: Sight) -> dict[str, Any]:
    return {**(shown(plan.placement, sight) if plan.placement else {}), "plan": plan}
