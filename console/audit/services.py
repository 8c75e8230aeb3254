"""Writing the trail, reading the part of it that somebody may see, and taking a change back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import Http404

from console.accounts.principal import Means, Principal
from console.accounts.roles import Role
from console.audit.models import OBJECT_NAME_MAX, REASON_MAX, AuditEntry
from console.audit.sentences import pattern_of, sentence_of
from console.orgs.models import Org
from console.search.services import Found, finder
from console.shell import request_context
from telemetry.events import note
from telemetry.topics import of_org


@dataclass(frozen=True, slots=True)
class Subject:
    """What a change is of, and who else is told of the change."""

    type: str
    id: object
    name: str
    org_id: int | None = None
    topics: Sequence[str] = ()

    @classmethod
    def of(cls, kind: str, key: object, name: str, org: Org | None, *topics: str) -> Subject:
        """Something of an org, whose viewers are told as well, or of none."""
        told = [*topics, of_org(org.slug)] if org else topics
        return cls(kind, key, name, org.pk if org else None, told)


def record(
    principal: Principal,
    action: str,
    subject: Subject,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str = "",
    sentence: str = "",
) -> AuditEntry:
    """Add one entry. Call it inside the transaction of the change, so that both are kept or none.

    Within `undo` it is the entry that undoes, if it is of the same action and object. It is an event of
    the subject's topics as well, without before and after: events are seen by more. It is told as
    `sentence`, or as its action is in `sentences`.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError(f"{action} must be recorded in the transaction that makes the change")
    context, undone = request_context.current(), _undoing.get()
    is_undo = undone is not None and (action, subject.type, str(subject.id)) == (
        *(undone.action, undone.object_type, undone.object_id),
    )
    entry = AuditEntry.objects.create(
        actor_id=principal.user_id,
        actor_name=principal.name,
        means=principal.means,
        address=context.address if context else None,
        request_id=context.request_id if context else "",
        action=action,
        object_type=subject.type,
        object_id=str(subject.id),
        object_name=cut(subject.name, OBJECT_NAME_MAX),
        org_id=subject.org_id,
        before=before,
        after=after,
        reason=cut(reason, REASON_MAX),
        undoes=undone if is_undo else None,
    )
    if subject.topics:
        told = sentence or sentence_of(action, subject.name)
        note(action, subject.topics, told, {"audit_entry": entry.pk}, entry.at)
    return entry


def visible_entries(principal: Principal) -> QuerySet[AuditEntry]:
    """What they did themselves, and all of the orgs or the platform where they are on-call or more."""
    entries = AuditEntry.objects.select_related("undone_by")
    orgs = principal.orgs_with(Role.ON_CALL)
    if orgs is None:
        return entries
    seen = Q(org_id__in=orgs)
    if principal.token is None or principal.token.org_id is None:
        seen |= Q(actor_id=principal.user_id)
    return entries.filter(seen)


def visible_changes(principal: Principal) -> QuerySet[AuditEntry]:
    """As `visible_entries`, for lists of recent changes: without the join tokens that the console gives
    instances and revokes, which would leave no room for what people did."""
    return visible_entries(principal).exclude(means=Means.SYSTEM, object_type="join_token")


def get_entry(principal: Principal, entry_id: int) -> AuditEntry:
    entry = visible_entries(principal).filter(pk=entry_id).first()
    if entry is None:
        raise Http404("There is no such entry, or it is not yours to see.")
    return entry


@dataclass(frozen=True)
class Filters:
    """The same for the page, the CSV and the API."""

    q: str = ""
    actor: str = ""
    action: str = ""
    org: Org | None = None
    request_id: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def apply(self, entries: QuerySet[AuditEntry]) -> QuerySet[AuditEntry]:
        if self.q:
            entries = entries.filter(
                Q(object_name__icontains=self.q)
                | Q(reason__icontains=self.q)
                | Q(object_id=self.q)
                | Q(actor_name__icontains=self.q)
            )
        if self.actor:
            entries = entries.filter(actor_name__istartswith=self.actor)
        if self.action:
            entries = entries.filter(
                Q(action__regex=pattern_of(self.action))
                if ": " in self.action
                else Q(action=self.action) | Q(action__startswith=f"{self.action.rstrip('.')}.")
            )
        if self.org:
            entries = entries.filter(org_id=self.org.pk)
        if self.request_id:
            entries = entries.filter(request_id=self.request_id)
        if self.since:
            entries = entries.filter(at__gte=self.since)
        if self.until:
            entries = entries.filter(at__lt=self.until)
        return entries


class CannotUndo(Exception):
    """Why this entry can't be taken back, in a sentence."""


Undo = Callable[[Principal, AuditEntry, str], None]
_undo: dict[str, Undo] = {}
# Who registers in modules that not every process loads.
_OTHERS: Final = (
    "console.alerts.rules.thresholds",
    "console.fleet.boxes",
    "console.fleet.descriptions.changes",
    "console.workloads.changes",
)
_undoing: ContextVar[AuditEntry | None] = ContextVar("undoing", default=None)  # what is taken back


def undoable(action: str, *refusals: type[Exception]) -> Callable[[Undo], Undo]:
    """Register how changes of this action are taken back.

    The function makes the opposite change through the ordinary service, which checks permissions
    and records it; it raises CannotUndo where the world has moved on. So do ValidationError and these
    `refusals` of the service, with what they say.
    """

    told: tuple[type[Exception], ...] = (ValidationError, *refusals)

    def register(function: Undo) -> Undo:
        def undo(principal: Principal, entry: AuditEntry, reason: str) -> None:
            try:
                function(principal, entry, reason)
            except told as error:
                said = error.messages if isinstance(error, ValidationError) else [str(error)]
                raise CannotUndo(" ".join(said)) from None

        _undo[action] = undo
        return function

    return register


@cache
def _undos() -> Mapping[str, Undo]:
    """All that are registered."""
    for module in _OTHERS:
        import_module(module)
    return _undo


def can_undo(entry: AuditEntry) -> bool:
    return entry.action in _undos() and not hasattr(entry, "undone_by")


@transaction.atomic
def undo(principal: Principal, entry: AuditEntry, reason: str) -> AuditEntry:
    """Take the change of `entry` back, as a new change with its own entry, which is returned.

    Raises CannotUndo where that makes no sense or would change nothing, Refused where they may not.
    """
    principal.check_may_change()
    if entry.action not in _undos():
        raise CannotUndo(f"“{entry.action_words}” can't be taken back.")
    entry = AuditEntry.objects.select_for_update(no_key=True).get(pk=entry.pk)  # one undo at a time
    if earlier := AuditEntry.objects.filter(undoes=entry).first():
        raise CannotUndo(f"It was taken back already, by entry {earlier.pk}.")
    before = _undoing.set(entry)
    try:
        _undos()[entry.action](principal, entry, reason or f"undo of entry {entry.pk}")
    finally:
        _undoing.reset(before)
    undone = AuditEntry.objects.select_related("undone_by").filter(undoes=entry).first()
    if undone is None:
        raise CannotUndo("It is so already: undoing would change nothing.")
    return undone


@finder("requests")
def find_requests(principal: Principal, text: str, most: int) -> list[Found]:
    """What a request has changed, by its id."""
    entries = visible_entries(principal).filter(request_id=text)[:most]
    return [
        Found(f"{one.action_words} {one.object_name}", f"by {one.actor_name}", "audit-entry", one.pk)
        for one in entries
    ]


def cut(text: str, most: int) -> str:
    """Return `text`, or as much of it as fits into `most` characters, with an ellipsis at its end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
