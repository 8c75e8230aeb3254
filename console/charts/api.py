"""REST API of the slowest transfers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal

from django.utils import timezone
from ninja import Field, Query, Schema

from console.accounts.browser import SignedInRequest
from console.api.fields import Moment
from console.api.problems import ApiError, FieldError
from console.api.routes import Router, answers
from console.charts.ranges import Range
from console.charts.slowest import ROWS_MAX, behind
from console.metrics.api import Topic
from telemetry.models import SlowTransfer

router = Router(tags=["metrics"])

DEFAULT_SPAN = timedelta(hours=1)


class TransferOut(Schema):
    at: datetime = Field(description="When it ended.")
    seconds: float
    direction: Literal["out", "in"] = Field(description="`out` for evicts, `in` for refills.")
    org: str
    session: str
    driver: str
    request: str = Field(description="The request it was for, if the engine reports it.")
    stream: str = Field(description="Group and index.")
    slot_first: int
    slot_last: int
    columns: int
    bytes: int
    node: str
    tier: str = Field(description="Path: `rail`, `leaf`, `spine`, or `unknown`.")
    nic_leaf: str
    link: str = Field(description="Spine link, if any.")


@router.get("/slowest", response=answers(list[TransferOut], 404))
def list_slowest(
    request: SignedInRequest,
    topic: Topic = "fleet",
    start: Moment | None = None,
    end: Moment | None = None,
    direction: Literal["out", "in"] | None = None,
    seconds_max: Annotated[float | None, Query(ge=0, description="Excludes longer transfers.")] = None,
    limit: Annotated[int, Query(ge=1, le=ROWS_MAX)] = ROWS_MAX,
) -> list[SlowTransfer]:
    """List the slowest transfers of a topic.

    A transfer is a batch of columns of one org. The two slowest of each driver, org and direction in
    every ten seconds are stored for a day.
    """
    until = end or timezone.now()
    since = start or until - DEFAULT_SPAN
    if since >= until:
        detail = "The end must be after the start."
        raise ApiError(
            "InvalidRequest", detail, errors=[FieldError(pointer="/query/end", detail=detail)]
        )
    found = behind(
        request.principal,
        topic,
        Range(since.timestamp(), until.timestamp()),
        direction=direction or "",
        seconds_max=seconds_max,
        limit=limit,
    )
    return found.transfers
