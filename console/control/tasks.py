"""Telling processes what to be: at once when it changes, and again until they are."""

from __future__ import annotations

import logging

from celery import shared_task
from django.utils import timezone

from console.control import rounds
from console.periodic import periodic
from telemetry.units import counted

log = logging.getLogger(__name__)


@shared_task
def push(targets: list[tuple[str, str]]) -> None:
    """After a change. What does not arrive is left to `reconcile`."""
    rounds.push([(kind, name) for kind, name in targets])


@periodic
def reconcile() -> None:
    _tell_of(rounds.reconcile())


@periodic
def reconcile_unsettled() -> None:
    _tell_of(rounds.reconcile_unsettled(timezone.now()))


def _tell_of(lagging: int) -> None:
    if lagging:
        log.info("%s not applied the desired state yet", counted(lagging, "target has", "targets have"))
