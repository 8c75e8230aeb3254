"""The hand-over over REST, and its notes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from django.http import HttpRequest
from ninja import Field, Query, Router, Schema

from console.accounts.browser import requester
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.alerts.state.silences import active_silences
from console.alerts.web.api import AlertOut, show_alert
from console.alerts.web.silences_api import OrgSlug, SilenceOut, show_silence
from console.api.fields import Input
from console.api.idempotency import Answer, idempotent
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.audit.api import EntryOut, show_entry
from console.handover import services
from console.handover.models import TEXT_MAX, Note
from console.operations.api import OperationOut, show_operation
from console.orgs.services import get_org

router = Router(tags=["hand-over"])


class NoteOut(Schema):
    id: int
    at: datetime
    author: str
    org: str | None = Field(description="Null: all orgs.")
    text: str


class NoteIn(Input):
    text: Annotated[
        str, Field(min_length=1, max_length=TEXT_MAX, pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")
    ]
    org: OrgSlug | None = Field(None, description="The org it concerns; null: all.")


class HandOverOut(Schema):
    at: datetime
    since: datetime
    evaluated_at: datetime | None
    open_count: int
    open: list[AlertOut] = Field(description="Most severe first.")
    over: list[AlertOut] = Field(description="Alerts resolved in this period.")
    silences: list[SilenceOut] = Field(description="Active and pending silences, by end time.")
    operations: list[OperationOut] = Field(description="Running or failed operations.")
    change_count: int
    changes: list[EntryOut] = Field(description="Newest first.")
    notes: list[NoteOut]


def show_note(note: Note) -> NoteOut:
    return NoteOut(
        id=note.pk,
        at=note.at,
        author=note.author,
        org=note.org.slug if note.org else None,
        text=note.text,
    )


@router.get(
    "/hand-over",
    response={200: HandOverOut, **documented(404)},
    summary="Get the handover report",
)
def get_hand_over(
    request: HttpRequest,
    org: Annotated[
        str, Query(max_length=48, pattern=r"^[a-z0-9-]*$", description="Only this org.")
    ] = "",
    hours: Annotated[int, Query(ge=1, le=services.HOURS_MAX)] = services.HOURS_DEFAULT,
) -> HandOverOut:
    principal = requester(request)
    found = services.hand_over(principal, org, hours)
    active = active_silences(found.at)
    return HandOverOut(
        at=found.at,
        since=found.since,
        evaluated_at=found.evaluator.at,
        open_count=found.open_count,
        open=[show_alert(alert, active, principal) for alert, _ in found.open],
        over=[show_alert(alert, active, principal) for alert in found.over],
        silences=[show_silence(silence) for silence in found.silences],
        operations=[show_operation(one, principal) for one in found.operations],
        change_count=found.change_count,
        changes=[show_entry(entry) for entry in found.changes],
        notes=[show_note(note) for note in found.notes],
    )


@router.get(
    "/hand-over/notes", response={200: Page[NoteOut], **documented()}, summary="List notes, newest first"
)
def list_notes(
    request: HttpRequest, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    return paginate(services.visible_notes(requester(request)), "-pk", cursor, limit, show_note)


@router.post("/hand-over/notes", response={201: NoteOut, **documented(404, 409)}, summary="Add a note")
@idempotent
def write_note(request: HttpRequest, payload: NoteIn) -> Answer:
    principal = requester(request)
    org = get_org(principal, payload.org) if payload.org else None
    needs = Authority(org.pk if org else None, Role.ON_CALL)
    return Answer(201, [needs], show_note(services.write(principal, org, payload.text)))
