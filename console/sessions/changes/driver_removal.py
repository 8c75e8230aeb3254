"""Taking a driver out of the fleet: its job ends, nobody waits for it any more, and it is let in again
only with a new join token.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from console.accounts.principal import SYSTEM, Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.control import services as control
from console.fleet.models import Driver, Removed
from console.fleet.services import check_fleet, for_change, visible_drivers
from console.operations import services as operations
from console.operations.machines import Machine, Step, machine
from console.operations.models import Operation
from console.operations.services import StalePlan
from console.sessions import holders
from console.sessions.changes.requests import of_job
from console.sessions.models import Job
from console.sessions.steps import machines
from telemetry.topics import FLEET, of_session, of_source

NODES_SHOWN_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Consequences:
    """What becomes of it if a driver is removed. Nothing has."""

    driver: Driver
    job: Job | None  # which ends
    streams: int
    memory_bytes: int
    nodes: tuple[str, ...]  # whose memory becomes free
    waiting: tuple[Operation, ...]  # which wait for what it confirms, and go on without it
    moving: tuple[Operation, ...]  # which change its streams, and go on without those
    running: Operation | None  # that starts or ends its job

    @property
    def is_alive(self) -> bool:
        return self.driver.joined_at is not None and self.driver.lost_at is None

    @property
    def in_the_way(self) -> Operation | None:
        """Which has to end first: it has nothing to do with this driver's streams."""
        return None if self.running in self.moving else self.running

    @property
    def target(self) -> str:
        """What the operation works on: nobody starts a job of that name meanwhile. Who does so already
        goes on."""
        if self.job is None or self.running in self.moving:
            return topic(self.driver)
        return of_job(self.job.session.name, self.job.name)

    @property
    def token(self) -> str:
        """Of other consequences, another token. Streams may grow and move meanwhile."""
        said = [
            self.driver.pk,
            self.driver.joined_at,
            self.job and self.job.pk,
            [str(one.pk) for one in (*self.waiting, *self.moving)],
        ]
        return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:32]


def topic(driver: Driver) -> str:
    return of_source("driver", driver.name)


def consequences(driver: Driver) -> Consequences:
    """Of removing a driver that they may see."""
    job = Job.objects.filter(driver=driver).select_related("session__org", "driver").first()
    streams = list(job.streams.all()) if job else []
    return Consequences(
        driver=driver,
        job=job,
        streams=len(streams),
        memory_bytes=sum(stream.memory_bytes for stream in streams),
        nodes=tuple(sorted(machines.nodes_of([job]))) if job else (),
        waiting=tuple(operations.waiting_for(topic(driver))),
        moving=tuple(_moving(driver.name)),
        running=operations.running_on(of_job(job.session.name, job.name)) if job else None,
    )


def _moving(name: str) -> QuerySet[Operation]:
    """What changes streams of this driver: resizes, moves and drains."""
    return Operation.objects.filter(streams__job__driver__name=name).distinct().order_by("pk")


@transaction.atomic
def remove(
    principal: Principal, name: str, *, plan_token: str | None = None, reason: str = ""
) -> Operation:
    """Remove a driver at once, with its job. The operation waits until the memory of the job is free.

    What changes its streams goes on without them: it may wait for just this driver, and be stuck. Who
    removes it vouches that its process has ended for good. Raises operations' Busy, and StalePlan where
    `plan_token` is of other consequences.
    """
    check_fleet(principal, Role.PLATFORM_ADMIN)
    paused = [one.pk for one in _moving(name)]
    operations.pause(paused)
    driver = for_change(principal, visible_drivers, name, Role.PLATFORM_ADMIN)
    found = consequences(driver)
    if plan_token is not None and plan_token != found.token:
        raise StalePlan
    for one in found.moving:
        if one.pk not in paused:  # it has just begun
            raise operations.Busy(one)
    operation = _begin(principal, found)
    _record(principal, found, reason)
    org = found.job.session.org if found.job else None
    if found.job is not None:
        named = machines.documents_of(driver.name) - {("driver", driver.name)}
        found.job.delete()
        named |= holders.reconcile(timezone.now())
        machines.tell(set(found.nodes), named, operation.sentence)
    if driver.joined_at is not None:
        removed = Removed.of(driver, org.slug if org else "")
        removed.by_person = principal != SYSTEM
        removed.save()
    driver.delete()
    control.forget("driver", name)
    waiting = (*found.waiting, *found.moving)
    operations.retry_stuck(principal, waiting, f"{name} was removed from the fleet.")
    return operation


def _begin(principal: Principal, found: Consequences) -> Operation:
    job = found.job
    operation = operations.start(
        principal,
        "driver.remove",
        found.target,
        f"Remove driver {found.driver.name}",
        plan={"driver": found.driver.name, **(_of_job(job) if job else {})},
        org_id=job.session.org_id if job else None,
        role=Role.ORG_ADMIN,
    )
    streams = job.streams.select_related("job__driver") if job else ()
    operation.notes.update(streams=[stream.name for stream in streams], nodes=list(found.nodes))
    operation.save(update_fields=["notes"])
    if job is not None:
        job.session.version += 1
        job.session.save(update_fields=["version"])
    return operation


def _of_job(job: Job) -> dict[str, str]:
    return {"session": job.session.name, "job": job.name}


def _record(principal: Principal, found: Consequences, reason: str) -> None:
    driver, job = found.driver, found.job
    org = job.session.org if job else None
    topics = [FLEET, topic(driver), *([of_session(job.session.name)] if job else [])]
    record(
        principal,
        "driver.remove",
        Subject.of("driver", driver.name, driver.name, org, *topics),
        before={
            "model": driver.model_name,
            "joined_at": driver.joined_at,
            "last_heartbeat_at": driver.last_heartbeat_at,
            **(_of_job(job) if job else {}),
            # Whose they are is not for all who see this.
            "waited_for_by": len(found.waiting) + len(found.moving),
        },
        reason=reason,
        sentence=f"Driver {driver.name} was removed from the fleet.",
    )


@machine("driver.remove")
class RemoveDriver(Machine):
    """It is removed already: what is left is that agents have heard of it."""

    steps = (
        Step(
            "gone",
            "Wait until the memory of its streams is freed",
            machines.gone,
            patience=machines.TOLD,
            final=True,
        ),
    )

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        return dict(operation.plan)
