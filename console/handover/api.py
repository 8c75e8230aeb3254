"""The hand-over over REST, and its notes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from ninja import Field, Query, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.alerts.models import Alert
from console.alerts.state.silences import active_silences
from console.alerts.web.api import AlertOut, with_silence
from console.alerts.web.silences_api import OrgSlug, SilenceOut
from console.api.fields import Input
from console.api.idempotency import Answer, idempotent
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import Context, SlugOf, read
from console.audit.api import EntryOut
from console.handover import services
from console.handover.models import TEXT_MAX
from console.handover.services import HandOver
from console.operations.api import OperationOut
from console.operations.models import Operation
from console.orgs.services import get_org
from console.visibility import without_places

router = Router(tags=["hand-over"])


class NoteOut(Schema):
    id: int
    at: datetime
    author: str
    org: SlugOf | None = Field(description="Null: all orgs.")
    text: str


class NoteIn(Input):
    text: Annotated[
        str, Field(min_length=1, max_length=TEXT_MAX, pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")
    ]
    org: OrgSlug | None = Field(None, description="The org it concerns; null: all.")


class HandOverOut(Schema):
    at: datetime
    since: datetime
    evaluated_at: datetime | None = Field(validation_alias="evaluator.at")
    open_count: int
    open: list[AlertOut] = Field(description="Most severe first.")
    over: list[AlertOut] = Field(description="Alerts resolved in this period.")
    silences: list[SilenceOut] = Field(description="Active and pending silences, by end time.")
    operations: list[OperationOut] = Field(description="Running or failed operations.")
    change_count: int
    changes: list[EntryOut] = Field(description="Newest first.")
    notes: list[NoteOut]

    @staticmethod
    def resolve_open(found: HandOver) -> list[Alert]:
        active = active_silences(found.at)
        return [with_silence(alert, active) for alert, _ in found.open]

    @staticmethod
    def resolve_over(found: HandOver) -> list[Alert]:
        active = active_silences(found.at)
        return [with_silence(alert, active) for alert in found.over]

    @staticmethod
    def resolve_operations(found: HandOver, context: Context) -> list[Operation]:
        principal = context["request"].principal
        return [without_places(principal, one) for one in found.operations]


@router.get("/hand-over", response=answers(HandOverOut, 404))
def get_hand_over(
    request: SignedInRequest,
    org: Annotated[
        str, Query(max_length=48, pattern=r"^[a-z0-9-]*$", description="Only this org.")
    ] = "",
    hours: Annotated[int, Query(ge=1, le=services.HOURS_MAX)] = services.HOURS_DEFAULT,
) -> HandOver:
    """Get the handover report."""
    return services.hand_over(request.principal, org, hours)


@listing(router, "/hand-over/notes", NoteOut, by="-pk")
def list_notes(request: SignedInRequest) -> Rows:
    """List notes, newest first."""
    return services.visible_notes(request.principal)


@router.post("/hand-over/notes", response=answers(NoteOut, 404, 409, status=201))
@idempotent
def write_note(request: SignedInRequest, payload: NoteIn) -> Answer:
    """Add a note."""
    principal = request.principal
    org = get_org(principal, payload.org) if payload.org else None
    needs = Authority(org.pk if org else None, Role.ON_CALL)
    return Answer(201, [needs], read(NoteOut, services.write(principal, org, payload.text), request))
