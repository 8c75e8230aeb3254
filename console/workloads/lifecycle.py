"""What the orchestrator calls, besides its own decisions, where intent meets other subsystems. Each may
be called again and again: it does the next thing that can be done now."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from typing import Final

from django.db import transaction
from django.db.models import Exists, OuterRef

from console.accounts.principal import SYSTEM
from console.audit.services import Subject, record
from console.operations import services as operations
from console.operations.services import running_on
from console.routing import services as routing
from console.sessions import services as sessions
from console.sessions.changes import sizes
from console.sessions.models import Session
from console.workloads.changes import OBSERVED, tell
from console.workloads.models import Instance, Rollout, Workload
from console.workloads.services import KIND
from telemetry.topics import of_session

KEPT: Final = timedelta(days=30)  # instances and rollouts that have ended


@transaction.atomic
def release(workload: Workload) -> bool:
    """Of one that is being deleted, and whose instances have gone: end its session with its jobs, and
    stop serving its model. Whether nothing is left. What its session still waits for, such as boxes, it
    waits for no longer."""
    if workload.served is not None:
        routing.remove_model(
            SYSTEM, routing.for_change(SYSTEM, workload.served.name), reason=f"Workload {workload.name}."
        )
        workload.served = None
        Workload.objects.filter(pk=workload.pk).update(served=None)
    session = Session.objects.filter(workload=workload).first()
    if session is None:
        return True
    reason = f"Workload {workload.name} is being deleted."
    if running := running_on(of_session(session.name)):
        if not session.deleting:
            with contextlib.suppress(operations.CannotCancel):  # a person has to look at it
                operations.cancel(SYSTEM, running.pk, reason)
    elif not session.deleting:
        sizes.delete(
            SYSTEM,
            sessions.for_change(SYSTEM, session.name),
            end_jobs=True,
            reason=reason,
        )
    return False


@transaction.atomic
def forget(workload: Workload) -> None:
    """Remove the row, with its history; the trail keeps what people did."""
    subject = Subject.of(KIND, workload.name, workload.name, workload.org, workload.topic)
    sentence = f"Workload {workload.name} is deleted."
    record(SYSTEM, "workload.deleted", subject, sentence=sentence)
    tell(workload, OBSERVED)
    workload.delete()


def forget_old(now: datetime) -> int:
    """Instances and rollouts that ended long ago. The last rollout of a revision is kept with it, since
    it says whether one can go back there."""
    gone = now - KEPT
    instances, _ = Instance.objects.filter(ended_at__lt=gone).delete()
    later = Rollout.objects.filter(to_revision=OuterRef("to_revision"), pk__gt=OuterRef("pk"))
    rollouts, _ = Rollout.objects.filter(Exists(later), ended_at__lt=gone).delete()
    return instances + rollouts
