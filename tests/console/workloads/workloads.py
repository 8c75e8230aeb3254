"""Workloads as rows, on a small fleet, without an orchestrator."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils import timezone

from console.accounts.principal import SYSTEM, Principal
from console.operations.models import Operation
from console.operations.services import advance
from console.orgs.models import Org
from console.workloads import changes, services, spec
from console.workloads.models import Condition, Instance, Rollout, Workload

TEXT = """\
name: talk
model: example/chat-8b
tokens_max: 32768
engine:
  kind: emulator
  emulator: {bytes_per_token: 192}
"""


def wanted(**more: Any) -> spec.WorkloadSpec:
    return spec.merged(spec.parse(TEXT), more)


def make_workload(principal: Principal = SYSTEM, **more: Any) -> Workload:
    """With its session, as far as a created one is."""
    workload = changes.create(principal, wanted(**more), reason="A test.")
    settle()
    return workload


def settle() -> None:
    """Let operations of sessions without jobs end."""
    for operation in Operation.objects.filter(done=False):
        while advance(operation.pk):
            """Its next step."""


def locked(principal: Principal, name: str = "talk") -> Workload:
    return services.for_change(principal, name)


def scale(principal: Principal, workload: Workload, replicas: int) -> Workload:
    return changes.update(principal, workload, changes.scaled(workload, replicas))


def a_workload(org: Org | None = None, name: str = "talk", model: str = "", **more: Any) -> Workload:
    """Rows only, without session and served model: for pages and routes."""
    said = wanted(name=name, model=model or f"example/{name}", org=org.slug if org else None)
    with transaction.atomic():
        workload = Workload.objects.create(
            name=name,
            org=org,
            model=said.model,
            boxes_per_replica=1,
            replicas=2,
            settings=spec.spelled_out(said.settings),
            **more,
        )
        changes._new_revision(SYSTEM, workload, said.template, note=f"{name} begins")
    Condition.objects.create(
        workload=workload, type="Ready", status="False", reason="Starting", message=f"{name} starts"
    )
    return workload


def an_instance(workload: Workload, ordinal: int = 0, **more: Any) -> Instance:
    number = workload.instances.count()
    revision = workload.revision
    assert revision is not None
    return Instance.objects.create(
        name=f"{workload.name}-{ordinal}-r{revision.number}-{number:04}",
        workload=workload,
        ordinal=ordinal,
        **({"revision": revision} | more),
    )


TRAFFIC = {
    "new": {"requests": 1200, "errors": 3, "ttft_seconds": 0.045, "per_second": 2.5},
    "old": {"requests": 900, "errors": 0, "ttft_seconds": None, "per_second": 2.4},
}


def a_rollout(workload: Workload, **more: Any) -> Rollout:
    assert workload.revision is not None
    return Rollout.objects.create(
        workload=workload,
        to_revision=workload.revision,
        **({"total": workload.replicas, "started_at": timezone.now()} | more),
    )
