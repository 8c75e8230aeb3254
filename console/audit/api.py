"""The audit trail over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from ninja import Field, Path, Schema

from console.accounts.browser import SignedInRequest
from console.api.fields import Moment, ReasonIn, SearchText
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
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


@listing(router, "/audit", EntryOut, 404, by="-pk")
def list_entries(
    request: SignedInRequest,
    q: SearchText = "",
    actor: SearchText = "",
    action: SearchText = "",
    org: SearchText = "",
    request_id: SearchText = "",
    since: Moment | None = None,
    until: Moment | None = None,
) -> Rows:
    """The audit trail."""
    filters = Filters(
        q=q,
        actor=actor,
        action=action,
        org=get_org(request.principal, org) if org else None,
        request_id=request_id,
        since=since,
        until=until,
    )
    return filters.apply(services.visible_entries(request.principal))


@router.get("/audit/{entry_id}", response=answers(EntryOut, 404))
def get_entry(request: SignedInRequest, entry_id: EntryId) -> AuditEntry:
    """One entry."""
    return services.get_entry(request.principal, entry_id)


@router.post("/audit/{entry_id}/undo", response=answers(EntryOut, 404, 409))
def undo(request: SignedInRequest, entry_id: EntryId, payload: ReasonIn) -> AuditEntry:
    """Undo a change."""
    principal = request.principal
    return services.undo(principal, services.get_entry(principal, entry_id), payload.reason)
