"""What each agent and driver should be, what it says it is, and what is wrong with its answers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from django.http import HttpRequest
from ninja import Query, Router, Schema
from pydantic import Field

from console.accounts.browser import requester
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.control import services
from console.control.models import Kind, Target
from kvss_agent.http.exchange import Fault

router = Router(tags=["fleet"])


class TargetOut(Schema):
    kind: Literal["node", "driver"]
    name: str
    desired_generation: int = Field(description="Generation of its desired document.")
    observed_generation: int = Field(description="Generation of the document that it reports.")
    observed_at: datetime | None = Field(description="Time of its last valid answer.")
    problem: str = Field(description="What is wrong, in a sentence.")
    fault: Fault | None = Field(description="Why its last answer was invalid.")
    faulty_since: datetime | None
    failures: int = Field(description="Consecutive attempts after which it was not up to date.")
    retry_at: datetime | None = Field(description="Time of the next attempt.")


def show_target(target: Target) -> TargetOut:
    return TargetOut(
        kind="node" if target.kind == Kind.NODE else "driver",
        name=target.name,
        desired_generation=target.generation,
        observed_generation=target.observed_generation,
        observed_at=target.observed_at,
        problem=target.problem,
        fault=Fault(target.fault) if target.fault else None,
        faulty_since=target.bad_since,
        failures=target.failures,
        retry_at=target.retry_at,
    )


@router.get(
    "/targets",
    response={200: Page[TargetOut], **documented(404)},
    summary="Agents and drivers with their desired and observed generations",
)
def list_targets(
    request: HttpRequest,
    faulty: Annotated[bool, Query(description="Only those with invalid answers.")] = False,
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    found = services.visible_targets(requester(request))
    return paginate(found.exclude(fault="") if faulty else found, "pk", cursor, limit, show_target)
