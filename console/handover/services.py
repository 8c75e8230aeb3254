"""What is handed over to the next on call: what is open, what goes on, what was done, and notes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.alerts.models import Alert, Silence
from console.alerts.services import (
    Evaluator,
    gravest_first,
    unsuppressed,
    visible_alerts,
)
from console.alerts.services import live_topic as alerts_topic
from console.alerts.state.lifecycle import OPEN, State
from console.alerts.state.silences import active_silences, silence_of, visible_silences
from console.audit.models import AuditEntry
from console.audit.services import Subject, record, visible_changes
from console.handover.models import Note
from console.operations.core import State as OperationState
from console.operations.models import Operation
from console.operations.services import visible_operations
from console.orgs.models import Org
from console.orgs.services import get_org
from console.visibility import of_orgs, without_places
from telemetry.topics import ALERTS, FLEET, of_org

HOURS: Final = (8, 12, 24, 72)
HOURS_DEFAULT: Final = 12
HOURS_MAX: Final = HOURS[-1]
SHOWN_MAX: Final = 100  # of each list; of more it is said how many there are
_BADLY: Final = (OperationState.FAILED.value, OperationState.STUCK.value)


@dataclass(frozen=True, slots=True)
class HandOver:
    at: datetime
    since: datetime
    org: Org | None
    evaluator: Evaluator
    open: list[tuple[Alert, Silence | None]]
    open_count: int
    over: list[Alert]  # since then
    silences: list[Silence]  # that are on or to come; those that end first
    operations: list[Operation]  # that go on, or went badly since then
    changes: list[AuditEntry]
    change_count: int
    notes: list[Note]

    @property
    def ends_soon(self) -> datetime:
        """What ends before this ends in a turn as long as the one that is handed over."""
        return self.at + (self.at - self.since)


def hand_over(principal: Principal, org: str = "", hours: int = HOURS_DEFAULT) -> HandOver:
    """Of an org, raising Http404 for a stranger; without one, of all that they may see."""
    of = get_org(principal, org) if org else None
    its, of_id = (Q(org=of), Q(org_id=of.pk)) if of else (Q(), Q())
    now = timezone.now()
    since = now - timedelta(hours=hours)
    alerts = visible_alerts(principal).filter(its)
    is_open = alerts.filter(unsuppressed(principal), state__in=OPEN)
    is_over = alerts.filter(state=State.RESOLVED, state_since__gte=since)
    active = active_silences(now)
    changes = visible_changes(principal).filter(of_id, at__gte=since)
    badly = Q(state__in=_BADLY, updated_at__gte=since)
    return HandOver(
        at=now,
        since=since,
        org=of,
        evaluator=Evaluator.now(),
        open=[(alert, silence_of(alert, active)) for alert in gravest_first(is_open)[:SHOWN_MAX]],
        open_count=is_open.count(),
        over=list(is_over.order_by("-state_since")[:SHOWN_MAX]),
        silences=list(
            visible_silences(principal).filter(its, ends_at__gt=now).order_by("ends_at")[:SHOWN_MAX]
        ),
        operations=[
            without_places(principal, one)
            for one in visible_operations(principal)
            .filter(of_id, Q(done=False) | badly)
            .order_by("done", "-created_at")[:SHOWN_MAX]
        ],
        changes=list(changes[:SHOWN_MAX]),
        change_count=changes.count(),
        notes=list(visible_notes(principal).filter(its, at__gte=since)[:SHOWN_MAX]),
    )


def live_topic(principal: Principal, org: str) -> str:
    """What tells that the page is to be read anew, beside now and then. `org` is theirs to see."""
    if org:
        return of_org(org)
    return FLEET if principal.on_platform(Role.VIEWER) else alerts_topic(principal)


def visible_notes(principal: Principal) -> QuerySet[Note]:
    """Those of their orgs. One for all is for those to see who have a role on the platform."""
    return Note.objects.filter(of_orgs(principal)).select_related("org")


@transaction.atomic
def write(principal: Principal, org: Org | None, text: str) -> Note:
    """Leave a note, of an org by who is on call in it, of all by who is on call on the platform."""
    principal.check_may_change()
    if not principal.holds(Role.ON_CALL, org.pk if org else None):
        whose = f"in {org.name}" if org else "on the platform; name an org to write of it"
        raise Refused(f"This needs the role on-call {whose}.")
    note = Note(org=org, author=principal.name, text=text.strip())
    note.full_clean()
    note.save()
    record(
        principal,
        "handover.note",
        Subject.of("note", note.pk, str(note), org, *(() if org else [ALERTS])),
        after={"text": note.text},
    )
    return note
