"""Dead letters over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from ninja import Field, Query, Schema

from console.accounts.browser import SignedInRequest
from console.api.fields import SearchText
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.metrics.dead_letter_views import WEEK_DAYS, counts, letters
from telemetry.ingest.dead_letters import COUNT_DAYS

router = Router(tags=["metrics"])


class LetterOut(Schema):
    id: int
    at: datetime
    cause: str
    source: str = Field(description="The topic of the process; `unknown` if it cannot be read.")
    reason: str
    size: int = Field(description="Bytes.")
    excerpt: str = Field(description="The beginning: JSON, or hexadecimal digits after `hex`.")


class DeadLetterCountOut(Schema):
    cause: str
    meaning: str
    source: str
    count: int
    last_at: datetime


class CountsOut(Schema):
    items: list[DeadLetterCountOut]


@listing(router, "/dead-letters", LetterOut, 403, by="-pk")
def list_letters(request: SignedInRequest, cause: SearchText = "", source: SearchText = "") -> Rows:
    """List dead letters, the newest first."""
    return letters(request.principal, cause, source)


@router.get("/dead-letters/counts", response=answers(CountsOut, 403))
def list_counts(
    request: SignedInRequest, days: Annotated[int, Query(ge=1, le=COUNT_DAYS)] = WEEK_DAYS
) -> dict[str, object]:
    """Count dead letters by cause and process."""
    return {"items": counts(request.principal, days)}
