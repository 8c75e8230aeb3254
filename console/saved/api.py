"""Saved views over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from ninja import Field, Path, Schema, Status
from pydantic import StringConstraints

from console.accounts.browser import SignedInRequest
from console.api.fields import NO_NUL, Input, Line
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
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


@listing(router, "/views", ViewOut, by="pk")
def list_views(request: SignedInRequest) -> Rows:
    """List saved views.

    Your own, and those that are shared with you.
    """
    return services.visible_views(request.principal)


@router.post("/views", response=answers(ViewOut, 404, status=201))
def save_view(request: SignedInRequest, payload: ViewIn) -> Status[SavedView]:
    """Save a view."""
    return Status(201, services.save_view(request.principal, **payload.model_dump()))


@router.delete("/views/{number}", response=answers(None, 404, status=204))
def delete_view(request: SignedInRequest, number: Number) -> Status[None]:
    """Delete a saved view."""
    services.delete_view(request.principal, number)
    return Status(204, None)
