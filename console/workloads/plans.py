"""What becomes of a workload if a spec is applied: boxes, memory in tokens, a revision. Nothing has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from console.audit.diff import changes
from console.orgs.models import Org
from console.placement import grants
from console.placement.rules import Cause
from console.sessions import rules as session_rules
from console.sessions.changes.sizes import new_session, plan_size
from console.sessions.models import Session
from console.sessions.plans import reservations
from console.sessions.plans.proposals import CannotPlan, Proposal, SessionSpec, more_boxes, propose
from console.sessions.plans.snapshot import Snapshot
from console.workloads import buckets
from console.workloads import spec as specs
from console.workloads.models import Workload
from console.workloads.spec import WorkloadSpec
from telemetry.units import counted

ENVIRONMENT: Final = "engine.environment."
KV: Final = "kv"  # the group that replicas are planned with until their layout is known


@dataclass(frozen=True, slots=True)
class Difference:
    """`rollout`: it makes new instances."""

    field: str
    before: Any
    after: Any
    rollout: bool


@dataclass(frozen=True)
class Plan:
    """`placement`: None where nothing changes about boxes. `boxes_free` of the fleet, `quota_left` and
    `replicas_left` of the owner, in boxes and in replicas: once it is done; None: not counted.
    `weights`: whose credentials they are read with; empty for those of no bucket."""

    name: str
    differences: tuple[Difference, ...]
    revision: int
    placement: Proposal | None
    boxes: int
    boxes_before: int
    boxes_free: int | None
    quota_left: int | None
    replicas_left: int | None
    version: int
    weights: str

    @property
    def makes_revision(self) -> bool:
        return any(one.rollout for one in self.differences)

    @property
    def token(self) -> str:
        said = [
            *(self.name, self.version, self.revision),
            [(one.field, one.after) for one in self.differences],
            self.placement.token if self.placement else "",
            self.weights,
        ]
        text = json.dumps(said, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def summary(self) -> str:
        if not self.differences:
            return "Nothing changes."
        parts = []
        if self.version == 0:
            parts.append(f"Create {self.name}.")
        elif self.makes_revision:
            parts.append(f"Make revision {self.revision} and roll it out.")
        else:
            parts.append("Change it in place, without a rollout.")
        if self.boxes != self.boxes_before:
            before = f" instead of {self.boxes_before}" if self.boxes_before else ""
            parts.append(f"It takes {counted(self.boxes, 'box', zero='no')}{before}.")
        if self.boxes_free is not None:
            stay = counted(self.boxes_free, "box stays", "boxes stay", zero="No")
            parts.append(f"{stay} free.")
        return " ".join(parts)


def differences(before: WorkloadSpec | None, after: WorkloadSpec) -> tuple[Difference, ...]:
    """By field, with those of the engine and its like by their parts."""
    was = specs.shown(before.whole) if before is not None else {}
    return tuple(
        Difference(path, _masked(path, old), _masked(path, new), path.split(".")[0] in specs.OF_TEMPLATE)
        for path, old, new in changes(was, specs.shown(after.whole))
    )


def _masked(path: str, value: Any) -> Any:
    """Variables of engines may be secret."""
    return "set" if path.startswith(ENVIRONMENT) and value is not None else value


def session_for(wanted: WorkloadSpec, org: Org | None) -> Session | None:
    """The session that it is to have; it is not saved. Raises ValidationError and Misconfigured."""
    if not wanted.boxes:
        return None
    path, size = wanted.session.path or "", wanted.bytes_per_token
    return new_session(wanted.name, org, wanted.boxes, path=path, bytes_per_token=size)


def plan_new(wanted: WorkloadSpec, org: Org | None) -> Plan:
    """With one job for each replica. Raises CannotPlan, Misconfigured and ValidationError."""
    replicas_left = check_replicas(org, wanted.replicas)
    session = session_for(wanted, org)
    snapshot = Snapshot.now()
    placement = _replicas(snapshot, session, wanted) if session is not None else None
    return Plan(
        name=wanted.name,
        differences=differences(None, wanted),
        revision=1,
        placement=placement,
        boxes=wanted.boxes,
        boxes_before=0,
        boxes_free=len(snapshot.free_boxes) - wanted.boxes if session is not None else None,
        quota_left=_quota_left(org, wanted.boxes),
        replicas_left=replicas_left,
        version=0,
        weights=buckets.sentence(org, wanted.weights),
    )


def _replicas(snapshot: Snapshot, session: Session, wanted: WorkloadSpec) -> Proposal:
    reservations.check_size(snapshot, session, wanted.boxes)
    boxes = tuple(sorted(more_boxes(snapshot, (), wanted.boxes)))
    each = wanted.boxes_per_replica
    jobs = tuple(
        _job(snapshot, f"{wanted.name}-{number}", boxes[number * each :][:each], session.bytes_per_token)
        for number in range(wanted.replicas)
    )
    rules = session_rules.effective_rules(session.org, session.path)
    return propose(snapshot, SessionSpec(wanted.name, rules, boxes, jobs, session.bytes_per_token))


def _job(snapshot: Snapshot, name: str, boxes: Sequence[str], bytes_per_token: int) -> grants.Job:
    return grants.Job(name, grants.spread(snapshot.fleet, boxes, KV, bytes_per_token))


def plan_change(workload: Workload, wanted: WorkloadSpec) -> Plan:
    """Raises CannotPlan and Misconfigured."""
    before = workload.spec()
    found = differences(before, wanted)
    replicas_left = check_replicas(workload.org, wanted.replicas, before.replicas)
    session = workload.session
    placement: Proposal | None = None
    free: int | None = None
    if session is not None and wanted.boxes > session.boxes_desired:
        placement = plan_size(session, wanted.boxes)
        free = len(Snapshot.now().free_boxes) - len(placement.added)
    elif session is not None:
        # Boxes come free when instances have gone; that a rule forbids the size is told now.
        reservations.check_size(Snapshot.now(), session, wanted.boxes)
    number = workload.revision.number if workload.revision else 0
    return Plan(
        name=workload.name,
        differences=found,
        revision=number + any(one.rollout for one in found),
        placement=placement,
        boxes=wanted.boxes,
        boxes_before=before.boxes,
        boxes_free=free,
        quota_left=_quota_left(workload.org, wanted.boxes - before.boxes),
        replicas_left=replicas_left,
        version=workload.version,
        weights=buckets.sentence(workload.org, wanted.weights),
    )


def check_replicas(org: Org | None, replicas: int, own: int = 0) -> int | None:
    """How many replicas are left of the owner's quota, with so many instead of its `own`; None without a
    quota. Raises CannotPlan where it takes more. Fewer than before are never refused."""
    quota = session_rules.of_an_org(org).replicas_quota if org is not None else None
    if org is None or quota is None:
        return None
    others = session_rules.replicas_of(org) - own
    left = quota - others - replicas
    if left < 0 and replicas > own:
        raise CannotPlan(
            Cause.EXCEEDS_ORG_QUOTA,
            f"The quota of {org.name} is {counted(quota, 'replica')}, its other workloads have "
            f"{others}, and {counted(replicas, 'is', 'are')} requested: {-left} too many. Request at "
            f"most {max(0, quota - others)}, scale another workload down, or have a platform admin "
            "raise the quota.",
        )
    return left


def _quota_left(org: Org | None, more: int) -> int | None:
    quota = session_rules.of_an_org(org).boxes_quota if org is not None else None
    return None if quota is None else quota - session_rules.held_by(org) - more
