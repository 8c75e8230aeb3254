"""Saved views over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from django.http import HttpRequest
from ninja import Field, Path, Router, Schema, Status
from pydantic import StringConstraints

from console.accounts.browser import requester
from console.api.fields import NO_NUL, Input, Line
from console.api.pagination import Rows, listing
from console.api.problems import documented
from console.api.shown import UsernameOf
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
    owner: UsernameOf
    created_at: datetime


@listing(router, "/views", ViewOut, by="pk", summary="List saved views")
def list_views(request: HttpRequest) -> Rows:
    """Your own, and those that are shared with you."""
    return services.visible_views(requester(request))


@router.post("/views", response={201: ViewOut, **documented(404)}, summary="Save a view")
def save_view(request: HttpRequest, payload: ViewIn) -> Status[SavedView]:
    return Status(201, services.save_view(requester(request), **payload.model_dump()))


@router.delete("/views/{number}", response={204: None, **documented(404)}, summary="Delete a saved view")
def delete_view(request: HttpRequest, number: Number) -> Status[None]:
    services.delete_view(requester(request), number)
    return Status(204, None)
