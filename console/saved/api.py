"""Saved views over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from django.http import HttpRequest
from ninja import Field, Path, Router, Schema, Status
from pydantic import StringConstraints

from console.accounts.browser import requester
from console.api.fields import NO_NUL, Input, Line
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.saved import services
from console.saved.models import ADDRESS_MAX, NAME_MAX, SavedView

router = Router(tags=["views"])

Number = Annotated[int, Path(ge=1, lt=1 << 63)]


class ViewIn(Input):
    name: Annotated[Line, StringConstraints(max_length=NAME_MAX)]
    address: Annotated[str, StringConstraints(min_length=1, max_length=ADDRESS_MAX, pattern=NO_NUL)] = (
        Field(description="Path and query of a page of this console.", examples=["/latency/?range=1h"])
    )
    share: Annotated[str, StringConstraints(max_length=60, pattern=r"^(platform|org:[a-z0-9-]+)?$")] = (
        Field("", description="`platform`, `org:acme`, or empty for private.")
    )


class ViewOut(Schema):
    id: int
    name: str
    address: str
    share: str = Field(description="`platform`, `org:acme`, or empty for private.")
    owner: str
    created_at: datetime


@router.get("/views", response={200: Page[ViewOut], **documented()}, summary="List saved views")
def list_views(
    request: HttpRequest, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    """Your own, and those that are shared with you."""
    return paginate(services.visible_views(requester(request)), "pk", cursor, limit, show)


@router.post("/views", response={201: ViewOut, **documented(404)}, summary="Save a view")
def save_view(request: HttpRequest, payload: ViewIn) -> Status[ViewOut]:
    return Status(201, show(services.save_view(requester(request), **payload.model_dump())))


@router.delete("/views/{number}", response={204: None, **documented(404)}, summary="Delete a saved view")
def delete_view(request: HttpRequest, number: Number) -> Status[None]:
    services.delete_view(requester(request), number)
    return Status(204, None)


def show(view: SavedView) -> ViewOut:
    return ViewOut(
        id=view.pk,
        name=view.name,
        address=view.address,
        share=view.share,
        owner=view.owner.username,
        created_at=view.created_at,
    )
