"""Getting every process to be what it should be, and telling who is and who is not.

`changed` is called by whoever changes intent, and `applied` says how far a change has come. Between them
are the rounds of `rounds.py`, in which processes are told.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from celery import current_app
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404
from kombu.exceptions import OperationalError

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.control.models import Change, Kind, Target, new_secret
from console.control.sending import Endpoint
from console.fleet.models import MODELS, Brain, Driver, Node, is_lost
from telemetry.events import in_order_of_commits

log = logging.getLogger(__name__)

PUSH: Final = "console.control.tasks.push"  # by its name, for what it does imports this module

Address = tuple[str, str]  # kind and name; * for all of a kind
ALL_DRIVERS: Final[Address] = (Kind.DRIVER.value, "*")
ALL_NODES: Final[Address] = (Kind.NODE.value, "*")
ALL_BRAINS: Final[Address] = (Kind.BRAIN.value, "*")
KEPT: Final = timedelta(days=30)
SILENT: Final = "It does not respond. It is updated as soon as it is back."


def changed(targets: Collection[Address], why: str, *, topic: str = "") -> Change:
    """Intent has changed for these. Call it late in the transaction that changed it.

    After the commit they are told at once, by a task; should that be lost, by the next reconcile. The
    change that is returned can be asked for with `applied`; who watches `topic` is told when somebody
    has heard of it.
    """
    in_order_of_commits()
    change = Change.objects.create(why=why[:200], targets=sorted(map(list, set(targets))), topic=topic)
    transaction.on_commit(lambda: push_soon(sorted(set(targets))))
    return change


def push_soon(targets: list[Address]) -> None:
    try:
        current_app.send_task(PUSH, ([list(target) for target in targets],), retry=False)
    except OperationalError as error:
        # The change is saved, and the request that made it has succeeded.
        log.warning("No task could be sent, so the next reconcile tells of the change: %s", error)


def claims_key_of(driver: str) -> bytes:
    """What gateways sign the claims of this engine's requests with."""
    return bytes(_target_of(Kind.DRIVER, driver).claims_key)


def claims_keys_of(drivers: Iterable[str]) -> dict[str, bytes]:
    """What gateways sign the claims of these engines' requests with, by driver."""
    found = targets_of(Kind.DRIVER, drivers).only("name", "claims_key")
    return {target.name: bytes(target.claims_key) for target in found}


def new_claims_key(driver: str) -> bytes:
    """Rotate it. The engine is told by a `changed` that has to follow."""
    target = _target_of(Kind.DRIVER, driver)
    target.claims_key = new_secret()
    target.save(update_fields=["claims_key"])
    return claims_key_of(driver)


def secret_of(kind: str, name: str) -> bytes:
    """What a driver shows to agents, and agents are told to expect of it."""
    return bytes(_target_of(kind, name).secret)


def secrets_of(kind: str, names: Iterable[str]) -> dict[str, bytes]:
    """What these show to agents, by name. In as many queries for many as for one."""
    found = targets_of(kind, names).only("name", "secret")
    return {target.name: bytes(target.secret) for target in found}


def _target_of(kind: str, name: str) -> Target:
    """It is made where there is none."""
    target = Target.objects.filter(kind=kind, name=name).first()
    return target or targets_of(kind, [name]).get()


def targets_of(kind: str, names: Iterable[str]) -> QuerySet[Target]:
    """Those of these names, which are made where there are none. When two make them at once, neither
    fails, as one of two that "get or create" would: it goes on, but PostgreSQL has logged an error."""
    wanted = set(names)
    found = Target.objects.filter(kind=kind, name__in=wanted)
    # Only those that are missing: their secrets are sealed, which takes time.
    if new := wanted.difference(found.values_list("name", flat=True)):
        made = [Target(kind=kind, name=name) for name in sorted(new)]
        Target.objects.bulk_create(made, ignore_conflicts=True)
    return found.all()


# Who has it


@dataclass(frozen=True, slots=True)
class Standing:
    """Of one target: whether it has heard of a change, and if not, why."""

    kind: str
    name: str
    has_it: bool
    generation: int
    observed_generation: int
    as_of: datetime | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a change has come. `seconds` is what it took to reach the last one; None until then."""

    change: Change | None
    standings: list[Standing]

    @property
    def has_it(self) -> int:
        return sum(one.has_it for one in self.standings)

    @property
    def lagging(self) -> list[Standing]:
        return [one for one in self.standings if not one.has_it]

    @property
    def seconds(self) -> float | None:
        if self.change is None or self.change.applied_at is None:
            return None
        return (self.change.applied_at - self.change.at).total_seconds()


def applied(
    change: Change | None, kind: str = Kind.DRIVER, *, among: Collection[str] | None = None
) -> Reach:
    """Who of a kind has heard of a change, and why others have not; without one, of all there was.

    `among`: of just these, also of those that it did not concern when it was made. Left out are those
    that have never been told anything, and those that are idle: nobody waits for them.
    """
    there = {one.name: one for one in joined(kind).defer("control_token")}
    targets = awaited(kind).filter(name__in=there).order_by("name")
    return Reach(
        change,
        [
            _standing(target, change.pk if change else 0, is_silent=is_lost(there[target.name]))
            for target in targets.defer("secret", "claims_key", "digest")
            if (target.name in among if among is not None else _concerns(change, target))
        ],
    )


def awaited(kind: str) -> QuerySet[Target]:
    """Those that were told something and serve somebody: a change has come as far as they have it."""
    return Target.objects.filter(kind=kind, generation__gt=0, is_idle=False)


def _concerns(change: Change | None, target: Target) -> bool:
    return change is None or change.concerns(target.kind, target.name)


def _standing(target: Target, change: int, *, is_silent: bool) -> Standing:
    has_it = target.observed_generation > 0 and target.observed_change >= change
    return Standing(
        kind=target.kind,
        name=target.name,
        has_it=has_it,
        generation=target.generation,
        observed_generation=target.observed_generation,
        as_of=target.observed_at,
        why_not="" if has_it else target.problem or (SILENT if is_silent else "It is being configured."),
    )


def visible_targets(principal: Principal) -> QuerySet[Target]:
    """All, for those with a role on the platform. Raises Http404 for others."""
    if not principal.on_platform(Role.VIEWER):
        raise Http404
    return Target.objects.filter(generation__gt=0).defer("secret", "claims_key", "digest")


def forget(kind: str, name: str) -> None:
    """It has left the fleet. Who joins under its name has another secret, and is told from the start."""
    Target.objects.filter(kind=kind, name=name).delete()


def forget_old_changes(now: datetime) -> int:
    """Whoever was away for longer is told what is intended now, as ever."""
    deleted, _ = Change.objects.filter(at__lt=now - KEPT).delete()
    return deleted


# The fleet


def joined(kind: str) -> QuerySet[Node | Driver | Brain]:
    return MODELS[kind].objects.filter(joined_at__isnull=False)


def in_the_open() -> list[str]:
    """Who is asked over plain HTTP through a network, or would be."""
    return [
        f"{kind} {one.name}"
        for kind in Kind.values
        for one in joined(kind).filter(control_url__startswith="http:").order_by("name")
        if Endpoint(one.control_url, "").is_in_the_open
    ]
