"""The audit trail over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Field, Path, Router, Schema

from console.accounts.browser import requester
from console.api.fields import Input, Moment, Reason, SearchText
from console.api.pagination import Rows, listing
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
    actor: str = Field(validation_alias="actor_name")
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
    undoes: int | None = Field(validation_alias="undoes_id")
    can_undo: bool

    @staticmethod
    def resolve_changes(entry: AuditEntry) -> list[dict[str, Any]]:
        return [dict(zip(ChangeOut.model_fields, one, strict=True)) for one in entry.changes]

    @staticmethod
    def resolve_can_undo(entry: AuditEntry) -> bool:
        return services.can_undo(entry)


class UndoIn(Input):
    reason: Reason = ""


@listing(router, "/audit", EntryOut, 404, by="-pk", summary="The audit trail")
def list_entries(
    request: HttpRequest,
    q: SearchText = "",
    actor: SearchText = "",
    action: SearchText = "",
    org: SearchText = "",
    request_id: SearchText = "",
    since: Moment | None = None,
    until: Moment | None = None,
) -> Rows:
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
    return filters.apply(services.visible_entries(principal))


@router.get("/audit/{entry_id}", response={200: EntryOut, **documented(404)}, summary="One entry")
def get_entry(request: HttpRequest, entry_id: EntryId) -> AuditEntry:
    return services.get_entry(requester(request), entry_id)


@router.post(
    "/audit/{entry_id}/undo",
    response={200: EntryOut, **documented(404, 409)},
    summary="Undo a change",
)
def undo(request: HttpRequest, entry_id: EntryId, payload: UndoIn) -> AuditEntry:
    principal = requester(request)
    return services.undo(principal, services.get_entry(principal, entry_id), payload.reason)
