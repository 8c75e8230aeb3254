"""The overview over REST: what the home page shows."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from django.http import HttpRequest
from ninja import Field, Query, Router, Schema

from console.accounts.browser import requester
from console.alerts.state.silences import active_silences
from console.alerts.web.api import AlertOut, show_alert
from console.api.problems import documented
from console.audit.api import EntryOut, show_entry
from console.operations.api import OperationOut, show_operation
from console.overview import services
from console.overview.services import STEP_SECONDS, Figure, Fleet

router = Router(tags=["overview"])


class FigureOut(Schema):
    name: str = Field(description="As in live frames: `refill.p99`.")
    unit: Literal["seconds", "/s", "share", "bytes"]
    value: float | None = Field(
        description="Value of the last ten to twenty seconds; null without traffic."
    )
    past: list[float | None] = Field(
        description=f"Values of the last hour, in steps of {STEP_SECONDS} s, oldest first."
    )
    yesterday: float | None = Field(description="Value of the same five minutes, a day ago.")
    alert: int | None = Field(description="The firing alert that is computed from it.")


class CountOut(Schema):
    what: str
    count: int


class FleetOut(Schema):
    nodes: list[CountOut] = Field(description="Nodes by state.")
    drivers_alive: int
    drivers_lost: int
    memory_ready_bytes: int
    last_seen_at: datetime | None


class OverviewOut(Schema):
    at: datetime
    reported_at: datetime | None = Field(description="When a driver last reported its numbers.")
    topic: str = Field(description="Topic of the figures; empty without access to any.")
    verdict: str
    figures: list[FigureOut]
    fleet: FleetOut | None = Field(description="Null without a role on the platform.")
    sessions: int
    sessions_waiting: int
    streams: list[CountOut] = Field(description="Streams by path.")
    alert_count: int
    alerts: list[AlertOut] = Field(description="The most severe alerts.")
    evaluated_at: datetime | None
    operation_count: int
    operations: list[OperationOut] = Field(description="The newest running operations.")
    changes: list[EntryOut] = Field(description="The newest changes.")


@router.get("/overview", response={200: OverviewOut, **documented(404)}, summary="Get the overview")
def get_overview(
    request: HttpRequest,
    org: Annotated[
        str, Query(max_length=48, pattern=r"^[a-z0-9-]*$", description="Limit it to this org.")
    ] = "",
) -> OverviewOut:
    principal = requester(request)
    found = services.overview(principal, org)
    active = active_silences(found.at)
    return OverviewOut(
        at=found.at,
        reported_at=found.reported_at,
        topic=found.topic,
        verdict=found.verdict[1],
        figures=[_figure(one) for one in found.figures],
        fleet=_fleet(found.fleet) if found.fleet else None,
        sessions=found.sessions,
        sessions_waiting=found.sessions_waiting,
        streams=[CountOut(what=tier, count=count) for _, tier, count in found.streams],
        alert_count=found.alert_count,
        alerts=[show_alert(alert, active, principal) for alert in found.alerts],
        evaluated_at=found.evaluator.at,
        operation_count=found.operation_count,
        operations=[show_operation(one, principal) for one in found.operations],
        changes=[show_entry(entry) for entry in found.entries],
    )


def _figure(one: Figure) -> FigureOut:
    return FigureOut(
        name=one.name,
        unit=one.unit,
        value=one.value,
        past=list(one.past),
        yesterday=one.yesterday,
        alert=one.alert.pk if one.alert else None,
    )


def _fleet(fleet: Fleet) -> FleetOut:
    return FleetOut(
        nodes=[CountOut(what=said, count=count) for _, said, count in fleet.states],
        drivers_alive=fleet.drivers_alive,
        drivers_lost=fleet.drivers_lost,
        memory_ready_bytes=fleet.memory_ready,
        last_seen_at=fleet.last_seen_at,
    )
