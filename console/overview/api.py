"""The overview over REST: what the home page shows."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from operator import itemgetter
from typing import Annotated, Literal

from ninja import Field, Query, Schema
from pydantic import BeforeValidator

from console.accounts.browser import SignedInRequest
from console.alerts.models import Alert
from console.alerts.state.silences import active_silences
from console.alerts.web.api import AlertOut, with_silence
from console.api.routes import Router, answers
from console.api.shown import Context, KeyOf
from console.audit.api import EntryOut
from console.operations.api import OperationOut
from console.operations.models import Operation
from console.overview import services
from console.overview.services import STEP_SECONDS, Overview
from console.visibility import without_places

router = Router(tags=["overview"])


class FigureOut(Schema):
    name: str = Field(description="As in live frames: `refill.p99`.")
    label: str = Field(description="The same in words: `Refill p99`.")
    unit: Literal["seconds", "/s", "share", "bytes"]
    value: float | None = Field(
        description="Value of the last ten to twenty seconds; null without traffic."
    )
    past: list[float | None] = Field(
        description=f"Values of the last hour, in steps of {STEP_SECONDS} s, oldest first."
    )
    yesterday: float | None = Field(description="Value of the same five minutes, a day ago.")
    alert: KeyOf | None = Field(description="The firing alert that is computed from it.")


class CountOut(Schema):
    what: str
    count: int


def _counts(rows: Iterable[tuple[object, str, int]]) -> list[dict[str, object]]:
    return [{"what": what, "count": count} for _, what, count in rows]


Counts = Annotated[list[CountOut], BeforeValidator(_counts)]


class FleetOut(Schema):
    nodes: Counts = Field(validation_alias="states", description="Nodes by state.")
    drivers_alive: int
    drivers_lost: int
    memory_ready_bytes: int = Field(validation_alias="memory_ready")
    last_seen_at: datetime | None


class OverviewOut(Schema):
    at: datetime
    reported_at: datetime | None = Field(description="When a driver last reported its numbers.")
    topic: str = Field(description="Topic of the figures; empty without access to any.")
    verdict: Annotated[str, BeforeValidator(itemgetter(1))]
    figures: list[FigureOut]
    fleet: FleetOut | None = Field(description="Null without a role on the platform.")
    sessions: int
    sessions_waiting: int
    streams: Counts = Field(description="Streams by path.")
    alert_count: int
    alerts: list[AlertOut] = Field(description="The most severe alerts.")
    evaluated_at: datetime | None = Field(validation_alias="evaluator.at")
    operation_count: int
    operations: list[OperationOut] = Field(description="The newest running operations.")
    changes: list[EntryOut] = Field(validation_alias="entries", description="The newest changes.")

    @staticmethod
    def resolve_alerts(found: Overview) -> list[Alert]:
        active = active_silences(found.at)
        return [with_silence(alert, active) for alert in found.alerts]

    @staticmethod
    def resolve_operations(found: Overview, context: Context) -> list[Operation]:
        principal = context["request"].principal
        return [without_places(principal, one) for one in found.operations]


@router.get("/overview", response=answers(OverviewOut, 404))
def get_overview(
    request: SignedInRequest,
    org: Annotated[
        str, Query(max_length=48, pattern=r"^[a-z0-9-]*$", description="Limit it to this org.")
    ] = "",
) -> Overview:
    """Get the overview."""
    return services.overview(request.principal, org)
