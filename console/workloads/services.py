"""Workloads: who may see and change them, and how they are found. `changes` changes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from django.contrib.postgres.aggregates import JSONBAgg
from django.core.exceptions import ValidationError
from django.db.models import (
    Aggregate,
    Count,
    F,
    JSONField,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    TextField,
    Value,
)
from django.db.models.functions import Cast, Coalesce, JSONObject
from django.http import Http404

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.fleet.nodes import InProgress
from console.fleet.services import lock_fleet
from console.orgs.models import Org
from console.orgs.services import get_org, names_orgs
from console.search.services import Found, finder, nearest
from console.sessions.models import Job
from console.sessions.services import moves_jobs
from console.visibility import of_orgs
from console.workloads.models import Condition, Instance, Revision, Rollout, Workload
from console.workloads.spec import Template, WorkloadSpec
from telemetry.units import counted

KIND: Final = "workload"
READY: Final = "Ready"
TOO_FEW_BOXES: Final = "TooFewBoxes"  # the reason where a replica is to leave its box and can't yet
CONDITION: Final = {name: name for name in ("type", "status", "reason", "message", "since")}
ROLLOUT: Final = {
    "from_revision": "from_revision__number",
    "to_revision": "to_revision__number",
    **{name: name for name in ("phase", "reason", "sentence", "switched", "total", "traffic")},
    **{name: name for name in ("started_at", "deadline_at", "ended_at")},
}
SHOWN: Final = (
    *("name", "version", "org_id", "org__slug", "model", "replicas", "boxes_per_replica"),
    *("revision__number", "stable_number", "generation", "observed_generation", "paused", "deleting"),
    *("restarts", "session__name", "created_at", "ready_count", "instance_count", "conditions_read"),
    *("rollout_read", "settings_text", "template_text"),
)
NO_REVISION: Final = "The workload has no revision of that number."
NO_INSTANCE: Final = "The workload has no instance of that name."


@dataclass(frozen=True, slots=True)
class ConditionRead:
    """A condition as it is shown. Lists have a thousand: read as JSON of their workload, they take a
    fifth of the time that rows take."""

    type: str
    status: str
    reason: str
    message: str
    since: datetime


class _Decoder(json.JSONDecoder):
    """For what lists have a thousand of."""

    def decode(self, s: str, *_: Any) -> Any:
        return msgspec.json.decode(s)


def visible_workloads(principal: Principal) -> QuerySet[Workload]:
    """Those of the orgs that they may see, for people of the platform all; with what lists show."""
    running = Instance.objects.filter(workload=OuterRef("pk"), ended_at=None).order_by()
    conditions = Condition.objects.filter(workload=OuterRef("pk")).order_by()
    rollout = with_shown(Rollout.objects.filter(workload=OuterRef("pk"), ended_at=None)).order_by()
    return (
        Workload.objects.select_related("org", "revision", "session")  # type: ignore[no-redef]  # by the model
        .annotate(
            stable_number=F("stable__number"),
            ready_count=_each(running.filter(serving=True), Count("*"), 0),
            instance_count=_each(running, Count("*"), 0),
            conditions_read=_each(
                conditions, JSONBAgg(JSONObject(**CONDITION), order_by="pk", output_field=_json()), []
            ),
            rollout_read=Subquery(rollout.values("shown"), output_field=_json()),
        )
        .filter(of_orgs(principal))
    )


def shown(workloads: QuerySet[Workload]) -> QuerySet[Any]:
    """What is shown of these, which came from `visible_workloads`: in rows, since to make objects of a
    list takes as long as everything else."""
    return workloads.annotate(
        settings_text=Cast("settings", TextField()),
        template_text=Cast("revision__template", TextField()),
    ).values_list(*SHOWN, named=True)


def with_shown(rollouts: QuerySet[Rollout]) -> QuerySet[Any]:
    """The same with what is shown of them, which is read without their revisions."""
    return rollouts.annotate(shown=JSONObject(**ROLLOUT))


def _json() -> JSONField[Any]:
    return JSONField(decoder=_Decoder)


def get_shown(principal: Principal, name: str) -> Any:
    """One row of `shown`. A stranger gets Http404."""
    row = shown(visible_workloads(principal)).filter(name=name).first()
    return principal.checked(row, Role.VIEWER, KIND)


def ready_of(conditions: Sequence[dict[str, str]]) -> dict[str, str] | None:
    """The condition `Ready`, of what is read of them; None before it is known."""
    return next((one for one in conditions if one["type"] == READY), None)


def conditions_of(workload: Workload) -> list[ConditionRead]:
    """Of a workload of `visible_workloads`, in the order in which people read them."""
    return [
        ConditionRead(
            one["type"],
            one["status"],
            one["reason"],
            one["message"],
            datetime.fromisoformat(one["since"]),
        )
        for one in workload.conditions_read
    ]


def _each(rows: QuerySet[Any], of: Aggregate, none: object) -> Coalesce:
    """An aggregate of the rows of each workload. A join would group whole workloads, with their
    templates."""
    found = Subquery(rows.values("workload").annotate(found=of).values("found"))
    return Coalesce(found, Value(none, of.output_field))


def filtered(
    workloads: QuerySet[Workload], *, org: str = "", q: str = "", ready: bool | None = None
) -> QuerySet[Workload]:
    """The same for the page and the API."""
    if org:
        workloads = workloads.filter(org__slug=org)
    if q:
        workloads = workloads.filter(Q(name__icontains=q) | Q(model__icontains=q))
    if ready is None:
        return workloads
    are = Q(pk__in=Condition.objects.filter(type=READY, status="True").values("workload"))
    return workloads.filter(are if ready else ~are)


def get_workload(principal: Principal, name: str, at_least: Role = Role.VIEWER) -> Workload:
    """The one access function: a stranger gets Http404, who may not do it gets Refused."""
    workload = visible_workloads(principal).filter(name=name).first()
    return principal.checked(workload, at_least, KIND)


def for_change(principal: Principal, name: str, at_least: Role = Role.ORG_ADMIN) -> Workload:
    """The workload, locked, while nobody else plans or reserves, for somebody who may change it.

    Raises InProgress for one that is being deleted.
    """
    principal.check_may_change()
    workload = get_workload(principal, name, at_least)
    lock_fleet()
    related = Workload.objects.select_related("org", "revision", "session", "served")
    found = related.select_for_update(no_key=True, of=("self",)).filter(pk=workload.pk).first()
    if found is None:
        raise Http404("There is no such workload any more.")
    if found.deleting:
        raise InProgress(f"{found.name} is being deleted.")
    return found


def may_add(principal: Principal) -> bool:
    """Workloads, tokenizers or buckets, of one org at least."""
    return principal.anywhere(Role.ORG_ADMIN) and not principal.read_only


def owner_of(principal: Principal, slug: str | None) -> Org | None:
    """The org that a new workload is to belong to. Raises Http404 and Refused."""
    principal.check_may_change()
    if slug is None:
        principal.check_platform(Role.PLATFORM_ADMIN)
        return None
    return get_org(principal, slug, Role.ORG_ADMIN)


def orgs_of(wanted: WorkloadSpec) -> list[Org] | None:
    """The orgs that may use its model; None for all. Raises ValidationError for one that is missing."""
    said = wanted.orgs_said
    if said == "all":
        return None
    found = list(Org.objects.filter(slug__in=said).order_by("slug"))
    if missing := sorted(set(said) - {org.slug for org in found}):
        raise ValidationError({"orgs": f"There is no org {', '.join(missing[:5])}."})
    return found


def touches_machines(template: Template) -> dict[str, object]:
    """The parts of a template that run commands on the platform's machines, or read what is on them, by
    their paths."""
    engine, found = template.engine, {}
    for name in ("command", "arguments", "environment"):
        if value := getattr(engine, name):
            found[f"engine.{name}"] = value
    # What was set may run what it is given, as `--trust-remote-code` does: it was set for these.
    runs, weights, tokenizer = bool(found), template.weights, template.tokenizer
    if runs:
        found["engine.kind"] = engine.kind
        found["tokenizer"] = tokenizer
    if weights is not None and (runs or weights.endpoint or not weights.source.startswith("s3://")):
        found["weights"] = (weights.source, weights.endpoint, weights.revision)
    if tokenizer is not None and tokenizer.folder:
        found["tokenizer.folder"] = tokenizer.folder
    if not template.cache.enabled:
        found["cache.enabled"] = False
    return found


def check_machines(principal: Principal, wanted: Template, before: Template | None) -> None:
    """Raises Refused where somebody other than a platform admin changes what touches machines."""
    if principal.on_platform(Role.PLATFORM_ADMIN):
        return
    was = touches_machines(before) if before is not None else {}
    now = touches_machines(wanted)
    if changed := sorted(part for part in now if now[part] != was.get(part)):
        raise Refused(
            f"Only a platform admin sets {', '.join(changed)}: engines run with it on the platform's "
            "machines. Use weights of a bucket and an uploaded tokenizer, or ask a platform admin."
        )


def get_revision(workload: Workload, number: int) -> Revision:
    found = workload.revisions.filter(number=number).first()
    if found is None:
        last = workload.revisions.order_by("-number").first()
        raise Http404(f"{NO_REVISION}{f' Its last one is {last.number}.' if last else ''}")
    return found


def revisions_of(workload: Workload) -> QuerySet[Revision]:
    return workload.revisions.order_by("-number")


def instances_of(workload: Workload, *, ended: bool | None = None) -> QuerySet[Instance]:
    """Its instances, or only those that have ended, or have not."""
    found = workload.instances.select_related("revision", "workload")
    return found if ended is None else found.filter(ended_at__isnull=not ended)


def get_instance(workload: Workload, name: str) -> Instance:
    found = instances_of(workload).filter(name=name).first()
    if found is None:
        raise Http404(NO_INSTANCE)
    return found


@finder("workloads")
def find_workloads(principal: Principal, text: str, most: int) -> list[Found]:
    found = Workload.objects.select_related("org").filter(of_orgs(principal))
    return [
        Found(one.name, f"{one.model}, {counted(one.replicas, 'replica')}", "workload", one.name)
        for one in nearest(found, text, "name", "model")[:most]
    ]


@names_orgs
def workloads_that_name(org: Org) -> list[str]:
    found = Workload.objects.filter(settings__orgs__contains=[org.slug]).exclude(org=org)
    return [f"workload {name}" for name in found.values_list("name", flat=True)]


@moves_jobs
def who_moves(job: Job) -> str:
    """The orchestrator does, for jobs of its sessions."""
    workload = Workload.objects.filter(session=job.session_id).first()
    if workload is None:
        return ""
    moves = f"Workload {workload.name} moves job {job.name} to another box"
    if Condition.objects.filter(workload=workload, reason=TOO_FEW_BOXES).exists():
        return f"{moves} as soon as enough boxes are free."
    return f"{moves}."
