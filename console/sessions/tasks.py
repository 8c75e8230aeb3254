"""What is done beside requests: replacing lost nodes, forgetting those that streams have left, and
assigning agents that store fragments."""

from __future__ import annotations

import logging

from django.utils import timezone

from console.fleet.membership.liveness import database_now
from console.periodic import periodic
from console.sessions import holders
from console.sessions.changes import replacements
from console.sessions.steps import former_homes, redundancy

log = logging.getLogger(__name__)


@periodic
def replace_lost_nodes() -> None:
    if begun := replacements.look(database_now()):
        log.warning("%d lost nodes are being replaced", begun)


@periodic
def forget_former_homes() -> None:
    former_homes.forget_emptied()


@periodic
def keep_holders() -> None:
    holders.keep(timezone.now())


@periodic
def look_at_redundancy() -> None:
    redundancy.look()
