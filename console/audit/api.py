"""The audit trail over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Field, Path, Router, Schema

from console.accounts.browser import requester
from console.api.fields import Input, Moment, Reason, SearchText
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.audit import services
from console.audit.models import AuditEntry
from console.audit.services import Filters
from console.orgs.services import get_org

router = Router(tags=["audit"])

EntryId = Annotated[int, Path(ge=1, le=2**63 - 1)]


class ChangeOut(Schema):
    path: str
    before: Any
    after: Any


class EntryOut(Schema):
    id: int
    at: datetime
    actor: str
    means: str
    address: str | None
    request_id: str
    action: str
    object_type: str
    object_id: str
    object_name: str
    reason: str
    before: Any
    after: Any
    changes: list[ChangeOut] = Field(description="Values that differ.")
    undoes: int | None
    can_undo: bool


class UndoIn(Input):
    reason: Reason = ""


def show_entry(entry: AuditEntry) -> EntryOut:
    return EntryOut(
        id=entry.pk,
        at=entry.at,
        actor=entry.actor_name,
        means=entry.means,
        address=entry.address,
        request_id=entry.request_id,
        action=entry.action,
        object_type=entry.object_type,
        object_id=entry.object_id,
        object_name=entry.object_name,
        reason=entry.reason,
        before=entry.before,
        after=entry.after,
        changes=[
            ChangeOut(path=path, before=before, after=after) for path, before, after in entry.changes
        ],
        undoes=entry.undoes_id,
        can_undo=services.can_undo(entry),
    )


@router.get("/audit", response={200: Page[EntryOut], **documented(404)}, summary="The audit trail")
def list_entries(
    request: HttpRequest,
    q: SearchText = "",
    actor: SearchText = "",
    action: SearchText = "",
    org: SearchText = "",
    request_id: SearchText = "",
    since: Moment | None = None,
    until: Moment | None = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    principal = requester(request)
    filters = Filters(
        q=q,
        actor=actor,
        action=action,
        org_id=get_org(principal, org).pk if org else None,
        request_id=request_id,
        since=since,
        until=until,
    )
    entries = filters.apply(services.visible_entries(principal))
    return paginate(entries, "-pk", cursor, limit, show_entry)


@router.get("/audit/{entry_id}", response={200: EntryOut, **documented(404)}, summary="One entry")
def get_entry(request: HttpRequest, entry_id: EntryId) -> EntryOut:
    return show_entry(services.get_entry(requester(request), entry_id))


@router.post(
    "/audit/{entry_id}/undo",
    response={200: EntryOut, **documented(404, 409)},
    summary="Undo a change",
)
def undo(request: HttpRequest, entry_id: EntryId, payload: UndoIn) -> EntryOut:
    principal = requester(request)
    undone = services.undo(principal, services.get_entry(principal, entry_id), payload.reason)
    return show_entry(undone)
