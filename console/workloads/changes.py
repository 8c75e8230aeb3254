"""Every way to change what is wanted of a workload. The orchestrator makes it so.

A change that takes boxes reserves them in its own transaction, so that it is refused at once where they
can't be had; boxes that are given back leave the session once their instances have gone (`lifecycle`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404

from console.accounts.principal import SYSTEM, Principal
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.fleet.nodes import Impossible
from console.fleet.services import lock_fleet
from console.operations.services import StalePlan, running_on
from console.orgs.models import Org
from console.placement.topology import Misconfigured
from console.routing import services as routing
from console.routing.models import ServedModel
from console.sessions import driver_orgs
from console.sessions.changes import sizes
from console.sessions.models import Job
from console.sessions.plans.proposals import CannotPlan
from console.workloads import plans, services, tokenizers
from console.workloads import spec as specs
from console.workloads.models import NOTE_MAX, Condition, Instance, Revision, Workload
from console.workloads.plans import Plan
from console.workloads.services import KIND, READY
from console.workloads.spec import FIXED, Template, WorkloadSpec
from inference_brain.desired import MODELS_MAX
from telemetry import events
from telemetry.hints import hint
from telemetry.topics import WORKLOADS, of_session

INTENT: Final = "workload.intent"  # the kind of hint that the orchestrator waits for
OBSERVED: Final = "workload.observed"
REVISIONS_KEPT: Final = 1000


# Creating


def plan_new(principal: Principal, wanted: WorkloadSpec) -> Plan:
    """Raises what `create` does, and changes nothing."""
    org = _check_new(principal, wanted)
    return plans.plan_new(wanted, org)


@transaction.atomic
def create(
    principal: Principal,
    wanted: WorkloadSpec,
    *,
    wait_seconds: int = 0,
    plan_token: str | None = None,
    reason: str = "",
) -> Workload:
    """Reserve its name, its model's name and its boxes. Instances follow.

    Where boxes can't be had now and `wait_seconds` is given, it waits so long for them. Raises
    CannotPlan, Misconfigured, StalePlan, ValidationError, Refused and Http404.
    """
    lock_fleet()
    org = _check_new(principal, wanted)
    _check_token(plan_token, lambda: plans.plan_new(wanted, org))
    plans.check_replicas(org, wanted.replicas)
    workload = Workload(
        name=wanted.name,
        org=org,
        model=wanted.model,
        boxes_per_replica=wanted.boxes_per_replica,
        replicas=wanted.replicas,
        settings=specs.spelled_out(wanted.settings),
    )
    events.free_topic(workload.topic)
    session = plans.session_for(wanted, org)
    why = f"Workload {wanted.name}."
    if session is not None:
        sizes.create(principal, session, wait_seconds=wait_seconds, reason=reason or why)
        workload.session = session
    workload.served = routing.add_model(
        SYSTEM,
        name=wanted.name,
        values=_served_values(wanted),
        orgs=services.orgs_of(wanted),
        reason=why,
    )
    workload.full_clean(exclude=["revision", "session", "served"])
    workload.save()
    _new_revision(principal, workload, wanted.template, note=reason)
    Condition.objects.create(
        workload=workload,
        type=READY,
        status="Unknown",
        reason="PendingEvaluation",
        message="Waiting for the orchestrator.",
    )
    _record(principal, "workload.create", workload, f"Workload {workload.name} created.", reason=reason)
    return workload


def _check_new(principal: Principal, wanted: WorkloadSpec) -> Org | None:
    org = services.owner_of(principal, wanted.org)
    services.orgs_of(wanted)
    services.check_machines(principal, wanted.template, None)
    tokenizers.check(wanted.template.tokenizer, org)
    if Workload.objects.filter(name=wanted.name).exists():
        raise ValidationError({"name": f"There is a workload {wanted.name} already."})
    if ServedModel.objects.filter(name=wanted.name).exists():
        raise ValidationError({"name": f"There is a served model {wanted.name}. Remove it first."})
    if ServedModel.objects.filter(model=wanted.model).exists():
        raise ValidationError({"model": f"{wanted.model} is served already, by another name."})
    if ServedModel.objects.count() >= MODELS_MAX:
        raise ValidationError({"name": f"At most {MODELS_MAX} models are served."})
    return org


def _served_values(wanted: WorkloadSpec) -> dict[str, Any]:
    return {
        "model": wanted.model,
        "tokens_max": wanted.tokens_max,
        "tokenizer": folder_of(wanted.template),
    }


def folder_of(template: Template) -> str:
    """Where brains read its tokenizer; empty if it has none."""
    source = template.tokenizer
    if source is None:
        return ""
    return tokenizers.folder(source.sha256) if source.sha256 else tokenizers.folder_of(source)


# Changing


def plan_change(principal: Principal, workload: Workload, wanted: WorkloadSpec) -> Plan:
    """Of one that came from `for_change`. Raises what `update` does, and changes nothing."""
    _check_change(principal, workload, wanted)
    return plans.plan_change(workload, wanted)


@transaction.atomic
def update(
    principal: Principal,
    workload: Workload,
    wanted: WorkloadSpec,
    *,
    wait_seconds: int = 0,
    plan_token: str | None = None,
    reason: str = "",
) -> Workload:
    """Have a workload that came from `for_change` be what a spec says. The same again changes nothing.

    A change of the template is a new revision. Raises CannotPlan, Misconfigured, StalePlan,
    ValidationError, Refused and Http404.
    """
    orgs = _check_change(principal, workload, wanted)
    _check_token(plan_token, lambda: plans.plan_change(workload, wanted), workload.version)
    before, was = workload.spec(), workload.snapshot()
    if specs.spelled_out(before.whole) == specs.spelled_out(wanted.whole):
        return workload
    plans.check_replicas(workload.org, wanted.replicas, before.replicas)
    _fit_boxes(principal, workload, wanted, wait_seconds=wait_seconds, reason=reason)
    workload.replicas = wanted.replicas
    workload.settings = specs.spelled_out(wanted.settings)
    if wanted.orgs_said != before.orgs_said:
        _let_in(workload, orgs, reason)
    if wanted.template.digest != before.template.digest:
        _new_revision(principal, workload, wanted.template, note=reason)
        fit_model(workload)
    _saved(workload)
    sentence = f"Workload {workload.name} changed."
    _record(principal, "workload.update", workload, sentence, before=was, reason=reason)
    return workload


@undoable("workload.update")
def _undo_update(principal: Principal, entry: AuditEntry, reason: str) -> None:
    """What engines were started with is read from the revision: an entry has no variables of engines."""
    try:
        workload = services.for_change(principal, str(entry.object_id))
        if workload.snapshot() != entry.after:
            raise CannotUndo("The workload was changed again since. Undo the later change first.")
        before = dict(entry.before or {})
        template = services.get_revision(workload, before.pop("revision")).template_read()
        del before["paused"], before["restarts"]
        parts = {one: getattr(template, one) for one in template.__struct_fields__}
        wanted = msgspec.structs.replace(specs.from_values(before), **parts)
        update(principal, workload, wanted, reason=reason)
    except Http404 as error:
        raise CannotUndo("The workload, or its earlier revision, no longer exists.") from error
    except (CannotPlan, Impossible, Misconfigured, specs.Wrong) as error:
        raise CannotUndo(str(error)) from error
    except ValidationError as error:
        raise CannotUndo(" ".join(error.messages)) from error


def _check_change(principal: Principal, workload: Workload, wanted: WorkloadSpec) -> list[Org] | None:
    before = workload.spec()
    fixed = {
        one: f"It can't be changed from {specs.shown(getattr(before, one))!r}: create another workload."
        for one in FIXED
        if getattr(before, one) != getattr(wanted, one)
    }
    if fixed:
        raise ValidationError(fixed)
    services.check_machines(principal, wanted.template, before.template)
    if wanted.template.tokenizer != before.template.tokenizer:
        tokenizers.check(wanted.template.tokenizer, workload.org)
    return services.orgs_of(wanted)


def _check_token(token: str | None, plan: Any, version: int | None = None) -> None:
    """Raises StalePlan where the plan that somebody has seen is not what would be done."""
    if token is None:
        return
    try:
        found = plan().token
    except CannotPlan:
        found = ""
    if found != token:
        raise StalePlan(version=version)


def _fit_boxes(
    principal: Principal,
    workload: Workload,
    wanted: WorkloadSpec,
    *,
    wait_seconds: int,
    reason: str,
) -> None:
    """Reserve more boxes at once; fewer leave when their instances have gone. A session with which
    something is being done is fitted when that is over."""
    session = workload.session
    if session is None or wanted.boxes == workload.boxes:
        return
    plans.plan_change(workload, wanted)  # raises what rules, quotas and the fleet forbid
    if wanted.boxes <= session.boxes_desired or running_on(of_session(session.name)) is not None:
        return
    sizes.resize(
        principal, session, wanted.boxes, wait_seconds=wait_seconds, reason=reason or "Workload scaled."
    )


def _let_in(workload: Workload, orgs: list[Org] | None, reason: str) -> None:
    """These orgs, and no others, may use the model, and are served by its drivers."""
    served = workload.served
    why = reason or f"Workload {workload.name}."
    if served is not None:
        values = {name: getattr(served, name) for name in ("model", "tokens_max", "tokenizer")}
        routing.update_model(SYSTEM, served, values=values, orgs=orgs, reason=why)
    jobs = Job.objects.filter(session=workload.session_id).select_related("driver").order_by("name")
    for job in jobs:
        driver_orgs.set_orgs(SYSTEM, job.driver, orgs, reason=why)


def scaled(workload: Workload, replicas: int) -> WorkloadSpec:
    """Its spec with so many replicas: no new revision. Raises spec.Wrong for a number that can't be."""
    return specs.merged(workload.spec(), {"replicas": replicas})


@transaction.atomic
def roll_back(
    principal: Principal, workload: Workload, to_number: int | None = None, *, reason: str = ""
) -> Workload:
    """Make a new revision that equals an earlier one; by default the last that was rolled out and is not
    the current one. Replicas, orgs and rollout stay as they are.

    Raises Http404, Impossible where there is none or where it is the current one, and Refused where it
    would bring back what only a platform admin sets.
    """
    current = workload.revision
    target = services.get_revision(workload, to_number) if to_number is not None else _earlier(workload)
    if current is None or target is None:
        raise Impossible(f"{workload.name} has no earlier revision to roll back to.")
    if target.digest == current.digest:
        raise Impossible(f"Revision {target.number} is what {workload.name} is to run now.")
    was = workload.snapshot()
    template = target.template_read()
    services.check_machines(principal, template, current.template_read())
    _new_revision(
        principal,
        workload,
        template,
        note=reason or f"Roll back to revision {target.number}.",
        same_as=target.number,
    )
    fit_model(workload)
    _saved(workload)
    sentence = f"Workload {workload.name} is rolled back to revision {target.number}. {reason}".rstrip()
    _record(principal, "workload.roll-back", workload, sentence, before=was, reason=reason)
    return workload


@transaction.atomic
def fit_model(workload: Workload) -> None:
    """Tell brains of the context length that all its instances have, which is the shorter one during a
    rollout, and of the tokenizer."""
    served, revision = workload.served, workload.revision
    if served is None or revision is None:
        return
    templates = [revision.template_read()]
    if workload.stable is not None:
        templates.append(workload.stable.template_read())
    values = {
        "model": workload.model,
        "tokens_max": min(one.tokens_max for one in templates),
        "tokenizer": folder_of(templates[0]),
    }
    locked = routing.for_change(SYSTEM, served.name)
    orgs = None if locked.for_all_orgs else list(locked.orgs.all())
    routing.update_model(SYSTEM, locked, values=values, orgs=orgs, reason=f"Revision {revision.number}.")


def _earlier(workload: Workload) -> Revision | None:
    """The stable one, if that is another; else the last whose rollout was completed, or whose rollout
    came to no end. Nobody goes back to what was rolled back."""
    current = workload.revision
    if current is None:
        return None
    if workload.stable is not None and workload.stable.digest != current.digest:
        return workload.stable
    others = workload.revisions.filter(number__lt=current.number).exclude(digest=current.digest)
    done = others.filter(rollouts__phase="done").first()
    return done or others.exclude(rollouts__phase="undone").first()


@transaction.atomic
def restart(principal: Principal, workload: Workload, *, reason: str = "") -> Workload:
    """Replace all instances by new ones of the same revision, as a rollout does."""
    was = workload.snapshot()
    workload.restarts += 1
    _saved(workload)
    sentence = f"Workload {workload.name} is restarted."
    _record(principal, "workload.restart", workload, sentence, before=was, reason=reason)
    return workload


@transaction.atomic
def pause(principal: Principal, workload: Workload, *, reason: str = "") -> Workload:
    """Stop its rollout where it is. Scaling and replacing what fails go on. Again it changes nothing."""
    return _set_paused(principal, workload, paused=True, reason=reason)


@transaction.atomic
def resume(principal: Principal, workload: Workload, *, reason: str = "") -> Workload:
    """Let its rollout proceed. Again it changes nothing."""
    return _set_paused(principal, workload, paused=False, reason=reason)


def _set_paused(principal: Principal, workload: Workload, *, paused: bool, reason: str) -> Workload:
    if workload.paused == paused:
        return workload
    was = workload.snapshot()
    workload.paused = paused
    _saved(workload)
    action = "workload.pause" if paused else "workload.resume"
    sentence = f"The rollout of {workload.name} is {'paused' if paused else 'resumed'}."
    _record(principal, action, workload, sentence, before=was, reason=reason)
    return workload


@transaction.atomic
def delete(principal: Principal, workload: Workload, *, reason: str = "") -> Workload:
    """Delete a workload that came from `for_change`: its instances drain, then its session goes."""
    was = workload.snapshot()
    workload.deleting = True
    _saved(workload)
    sentence = f"Workload {workload.name} is being deleted."
    _record(principal, "workload.delete", workload, sentence, before=was, reason=reason)
    return workload


# What they have in common


def _new_revision(
    principal: Principal,
    workload: Workload,
    template: Template,
    *,
    note: str,
    same_as: int | None = None,
) -> Revision:
    """The next number. What an equal one was compiled to is known from it."""
    last = workload.revisions.order_by("-number").first()
    twin = workload.revisions.filter(digest=template.digest, epoch__isnull=False).first()
    made = Revision(
        workload=workload,
        number=last.number + 1 if last is not None else 1,
        template=specs.spelled_out(template),
        digest=template.digest,
        same_as=same_as,
        author_id=principal.user_id,
        author_name=principal.name,
        note=note[:NOTE_MAX],
    )
    if twin is not None:
        made.artifact, made.layout, made.epoch = twin.artifact, twin.layout, twin.epoch
        made.compiled_at = twin.compiled_at
    made.save()
    workload.revision = made
    workload.save(update_fields=["revision"])
    _forget_old_revisions(workload)
    return made


def _forget_old_revisions(workload: Workload) -> None:
    """Those beyond a thousand that nothing runs."""
    kept = workload.revisions.order_by("-number").values_list("pk", flat=True)[:REVISIONS_KEPT]
    run = Instance.objects.filter(workload=workload, ended_at=None).values("revision")
    old = workload.revisions.exclude(pk__in=list(kept)).exclude(pk__in=run)
    old.exclude(pk__in=[workload.stable_id or 0]).delete()


def _saved(workload: Workload) -> None:
    workload.version += 1
    workload.generation += 1
    workload.save(
        update_fields=[
            *("replicas", "settings", "paused", "deleting", "restarts"),
            *("version", "generation", "revision"),
        ]
    )


def tell(workload: Workload, kind: str = INTENT) -> None:
    """Wake the orchestrator, and the pages that show it."""
    hint([workload.topic, WORKLOADS], kind)


def _record(
    principal: Principal,
    action: str,
    workload: Workload,
    sentence: str,
    *,
    before: dict[str, Any] | None = None,
    reason: str,
) -> None:
    record(
        principal,
        action,
        Subject.of(KIND, workload.name, workload.name, workload.org, workload.topic),
        before=before,
        after=workload.snapshot() if not workload.deleting else None,
        reason=reason,
        sentence=sentence,
    )
    tell(workload)
