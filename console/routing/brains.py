"""Brains: who sees them, and removing one. How they join: `console.fleet.membership`."""

from __future__ import annotations

from django.db import transaction
from django.db.models import QuerySet

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.control import services as control
from console.control.models import Kind
from console.fleet.models import Brain, Removed, topic
from console.fleet.services import check_fleet, get
from console.fleet.services import for_change as fleet_for_change
from console.operations import services as operations
from console.operations.models import Operation
from console.search.services import Found, finder, nearest
from telemetry.topics import FLEET


def visible_brains(principal: Principal) -> QuerySet[Brain]:
    check_fleet(principal)
    return Brain.objects.all()


def get_brain(principal: Principal, name: str) -> Brain:
    """Raises Http404."""
    return get(visible_brains(principal), name)


def for_change(principal: Principal, name: str) -> Brain:
    """Locked until the end of the transaction, for somebody who may remove it."""
    return fleet_for_change(principal, visible_brains, name, Role.PLATFORM_ADMIN)


def waiting_for(brain: Brain) -> list[Operation]:
    """What waits for its confirmation."""
    return list(operations.waiting_for(topic(brain)))


@transaction.atomic
def remove_brain(principal: Principal, brain: Brain, *, reason: str = "") -> None:
    """Take a brain that came from `for_change` out of the fleet. Who removes it vouches that its process
    has ended for good: purges go on without its confirmation, and their receipts say so."""
    waiting = waiting_for(brain)
    record(
        principal,
        "brain.remove",
        Subject("brain", brain.name, brain.name, topics=[FLEET, topic(brain)]),
        before={
            "api_url": brain.api_url,
            "joined_at": brain.joined_at,
            "last_heartbeat_at": brain.last_heartbeat_at,
            "waited_for_by": len(waiting),
        },
        reason=reason,
        sentence=f"Brain {brain.name} was removed from the fleet.",
    )
    if brain.joined_at is not None:
        Removed.of(brain).save()
    brain.delete()
    control.forget(Kind.BRAIN, brain.name)
    operations.retry_stuck(principal, waiting, f"{brain.name} was removed from the fleet.")


@finder("brains")
def find_brains(principal: Principal, text: str, most: int) -> list[Found]:
    if not principal.on_platform(Role.VIEWER):
        return []
    found = nearest(visible_brains(principal), text, "name")[:most]
    return [Found(one.name, "lost" if one.lost_at else "", "routing-brain", one.name) for one in found]
