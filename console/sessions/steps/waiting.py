"""What a session waits for, while operations of it wait for a place. There may be several at once."""

from __future__ import annotations

from django.utils import timezone

from console.operations import services as operations
from console.operations.core import State
from console.operations.models import Operation
from console.placement.rules import Cause
from console.sessions.models import Session
from telemetry.topics import of_session

PLACED = "placed"  # the note of an operation that has its place
FIELDS = ("cause", "cause_sentence", "waiting_since")


def begin(session: Session, cause: Cause, sentence: str) -> None:
    """It waits for this now, if not for something else before. The caller saves it."""
    session.cause, session.cause_sentence = cause.value, sentence[:500]
    session.waiting_since = session.waiting_since or timezone.now()


def end(session: Session, operation: Operation) -> None:
    """An operation waits no longer: nor does the session, unless another one does."""
    others = operations.running_within(of_session(session.name)).exclude(pk=operation.pk)
    placing = others.filter(state=State.RUNNING, plan__has_key="wait_seconds")
    if not placing.exclude(notes__has_key=PLACED).exists():
        session.cause = session.cause_sentence = ""
        session.waiting_since = None
        session.save(update_fields=FIELDS)
