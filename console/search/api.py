"""Search over REST."""

from __future__ import annotations

from typing import Annotated

from ninja import Field, Query, Schema

from console.accounts.browser import SignedInRequest
from console.api.fields import NO_NUL
from console.api.routes import Router, answers
from console.search import services
from console.search.services import TEXT_MAX, Group

router = Router(tags=["search"])
MOST = 50


class FoundOut(Schema):
    name: str
    detail: str
    address: str = Field(description="URL of its page.")


class GroupOut(Schema):
    kind: str = Field(examples=["nodes"])
    found: list[FoundOut] = Field(description="Best match first.")
    are_more: bool


@router.get("/search", response=answers(list[GroupOut]))
def search(
    request: SignedInRequest,
    q: Annotated[
        str,
        Query(
            min_length=1,
            max_length=TEXT_MAX,
            pattern=NO_NUL,
            description="A name or a part of it, an alert's number, an operation's or request's id.",
        ),
    ],
    most: Annotated[
        int, Query(ge=1, le=MOST, description="At most so many of each kind.")
    ] = services.OF_A_KIND_MAX,
    far: Annotated[
        bool, Query(description="Ask the drivers instead of the database, which takes longer.")
    ] = False,
) -> list[Group]:
    """Find anything by its name or id."""
    return services.search(request.principal, q, most, far=far)
