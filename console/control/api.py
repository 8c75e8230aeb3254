"""What agents, drivers and brains should be, what they say they are, and what is wrong with that."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from ninja import Query, Schema
from pydantic import Field

from console.accounts.browser import SignedInRequest
from console.api.pagination import Rows, listing
from console.api.routes import Router
from console.api.shown import OR_NULL
from console.control import services
from kvss_agent.http.answers import Fault

router = Router(tags=["fleet"])


class TargetOut(Schema):
    kind: Literal["node", "driver", "brain"]
    name: str
    desired_generation: int = Field(
        validation_alias="generation", description="Generation of its desired document."
    )
    observed_generation: int = Field(description="Generation of the document that it reports.")
    observed_at: datetime | None = Field(description="Time of its last valid answer.")
    problem: str = Field(description="What is wrong, in a sentence.")
    fault: Annotated[Fault | None, OR_NULL] = Field(description="Why its last answer was invalid.")
    faulty_since: datetime | None = Field(validation_alias="bad_since")
    failures: int = Field(description="Consecutive attempts after which it was not up to date.")
    retry_at: datetime | None = Field(description="Time of the next attempt.")


@listing(router, "/targets", TargetOut, 404, by="pk")
def list_targets(
    request: SignedInRequest,
    faulty: Annotated[bool, Query(description="Only those with invalid answers.")] = False,
) -> Rows:
    """Agents, drivers and brains with their desired and observed generations."""
    found = services.visible_targets(request.principal)
    return found.exclude(fault="") if faulty else found
