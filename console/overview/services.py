"""The overview of the fleet or of an org: state, figures, alerts, operations and changes.

One function reads all of it, for the page and for the API.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal
from urllib.parse import urlencode

from django.db.models import Count, Max, Q, QuerySet, Sum
from django.urls import reverse

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.conditions.condition import name_of
from console.alerts.models import Alert
from console.alerts.rules.rule import Severity
from console.alerts.services import (
    EVALUATOR_BEHIND,
    Evaluator,
    gravest_first,
    unsuppressed,
    visible_alerts,
)
from console.alerts.state.lifecycle import OPEN, State
from console.audit.models import AuditEntry
from console.audit.services import visible_changes
from console.fleet.insight import overview as fleet
from console.fleet.insight.activity import TIERS
from console.fleet.insight.diagram import Look
from console.fleet.models import Driver, Node
from console.operations.models import Operation
from console.operations.services import visible_operations
from console.orgs.models import Org
from console.orgs.services import get_org, visible_orgs
from console.overview import trends
from console.placement.topology import State as NodeState
from console.placement.topology import Tier
from console.sessions.models import Session, Stream
from console.visibility import without_places
from telemetry.figures import OF_DRIVERS, CurrentFigures, Figures, figures_now, figures_past
from telemetry.metrics import TIER_WORDS
from telemetry.models import Source
from telemetry.topics import FLEET, of_org
from telemetry.units import age, counted

Unit = Literal["seconds", "/s", "share", "bytes"]
STEP_SECONDS: Final = 300
STEPS: Final = 13  # an hour, and the five minutes that it is compared with
DAY_SECONDS: Final = 86_400
ALERTS_SHOWN: Final = 6
OPERATIONS_SHOWN: Final = 5
CHANGES_SHOWN: Final = 8
ORGS_OFFERED: Final = 200
NAMES: Final = (
    *("refill.p99", "refill.p50", "refill.rate"),
    *("evict.p99", "evict.p50", "evict.rate"),
    "hit.rate",
)
SPINE: Final = "spine.share"
MEMORY: Final = "memory"
_LABELS: Final = {
    "refill.rate": "Refills",
    "evict.rate": "Evicts",
    "hit.rate": "Hit rate",
    SPINE: "Over the spine",
    MEMORY: "Memory in use",
}
_UNITS: Final[dict[str, Unit]] = {"rate": "/s", "p50": "seconds", "p99": "seconds"}
_METRICS: Final = {
    "refill": OF_DRIVERS.refill,
    "evict": OF_DRIVERS.evict,
    "hit": OF_DRIVERS.hit,
    "spine": OF_DRIVERS.paths,
    MEMORY: OF_DRIVERS.memory,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A current value, its history, and a link to the page that explains it."""

    name: str
    value: float | None
    past: Sequence[float | None]  # of the last hour, in steps
    yesterday: float | None
    link: str
    alert: Alert | None  # the alert that is computed from it
    of: int = 0  # the maximum, where it is known

    @property
    def label(self) -> str:
        about, _, what = self.name.partition(".")
        hits_in = f"Hits in {TIER_WORDS.get(what, what)}"
        return _LABELS.get(self.name, hits_in if about == "hit" else f"{about.capitalize()} {what}")

    @property
    def unit(self) -> Unit:
        if self.name == MEMORY:
            return "bytes"
        about, _, what = self.name.partition(".")
        return "share" if about in ("hit", "spine") else _UNITS[what]

    @property
    def is_live(self) -> bool:
        """Whether live frames contain it."""
        return self.name != MEMORY

    @property
    def line(self) -> str:
        return trends.line(self.past)

    @property
    def changes(self) -> list[tuple[str, str]]:
        return list(trends.changes(self.past, self.yesterday, is_share=self.unit == "share"))


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet, for principals with a role on the platform."""

    states: list[tuple[Look, str, int]]
    drivers_alive: int
    drivers_lost: int
    memory_ready: int
    last_seen_at: datetime | None

    @property
    def node_count(self) -> int:
        return sum(count for _, _, count in self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    topic: str  # of the figures; empty without access to any
    org: Org | None
    at: datetime
    reported_at: datetime | None  # when a driver last reported; all figures are from drivers
    is_reporting: bool  # whether the topic has current numbers; without them, traffic is unknown
    figures: list[Figure] = field(default_factory=list)
    fleet: Fleet | None
    sessions: int
    sessions_waiting: int
    streams: list[tuple[str, str, int]]  # look, path, count
    alerts: list[Alert]
    alert_counts: dict[tuple[str, str], int]  # by state and severity
    evaluator: Evaluator
    operations: list[Operation]
    operation_count: int
    entries: list[AuditEntry]

    @property
    def has_numbers(self) -> bool:
        return any(one.value is not None or any(one.past) for one in self.figures)

    @property
    def alert_count(self) -> int:
        return sum(self.alert_counts.values())

    @property
    def verdict(self) -> tuple[Look, str]:
        """The state in one sentence. It is not well while rules are not evaluated or data is missing."""
        if self.evaluator.late:
            return "bad", "Alert rules are not being evaluated."
        counts = self.alert_counts
        firing = sum(count for (state, _), count in counts.items() if state == State.FIRING)
        unknown = sum(count for (state, _), count in counts.items() if state == State.NO_DATA)
        pages = counts.get((State.FIRING, Severity.PAGE), 0)
        if firing:
            alerts, urgent = counted(firing, "alert"), counted(pages, "page", zero="no")
            return ("bad" if pages else "warn"), f"{alerts} firing ({urgent})."
        if unknown:
            return "off", f"{counted(unknown, 'alert')} without data."
        if (evaluated_at := self.evaluator.at) and self.at - evaluated_at > EVALUATOR_BEHIND:
            last = age((self.at - evaluated_at).total_seconds())
            return "warn", f"No alert is firing, but rules were last evaluated {last}."
        return "ok", "All is well."


def scopes(principal: Principal, chosen: Org | None) -> list[Org]:
    """The orgs to choose from: the first visible ones, and the chosen one."""
    offered = list(visible_orgs(principal)[:ORGS_OFFERED])
    return [*offered, *([chosen] if chosen and chosen not in offered else [])]


def overview(principal: Principal, org: str = "") -> Overview:
    """Of an org (Http404 if the principal may not see it), else of the fleet or of their first org."""
    sees_all = principal.on_platform(Role.VIEWER)
    of = _org(principal, org, sees_all=sees_all)
    topic = of_org(of.slug) if of else FLEET if sees_all else ""
    found = visible_alerts(principal).filter(unsuppressed(principal), state__in=OPEN)
    operations = visible_operations(principal).filter(done=False)
    entries = visible_changes(principal)
    if of:
        found, operations, entries = (
            found.filter(org=of),
            operations.filter(org_id=of.pk),
            entries.filter(org_id=of.pk),
        )
    counted = found.values_list("state", "severity").annotate(Count("pk")).order_by()
    gravest = list(gravest_first(found)[:ALERTS_SHOWN])
    about = Q(org=of) if of else Q() if sees_all else Q(pk__in=[])
    sessions = Session.objects.filter(about)
    current = figures_now([topic], time.time()).get(topic)
    its_fleet = _fleet(principal) if sees_all and not of else None
    return Overview(
        topic=topic,
        org=of,
        at=datetime.now(UTC),
        reported_at=Source.objects.filter(kind="driver").aggregate(at=Max("seen_at"))["at"],
        is_reporting=current is not None,
        figures=(
            _figures(topic, current, gravest, its_fleet.memory_ready if its_fleet else 0)
            if topic
            else []
        ),
        fleet=its_fleet,
        sessions=sessions.count(),
        sessions_waiting=sessions.filter(waiting_since__isnull=False).count(),
        streams=_streams(sessions),
        alerts=gravest,
        alert_counts={(state, severity): count for state, severity, count in counted},
        evaluator=Evaluator.now(),
        operations=[
            without_places(principal, one)
            for one in operations.order_by("-created_at")[:OPERATIONS_SHOWN]
        ],
        operation_count=operations.count(),
        entries=list(entries[:CHANGES_SHOWN]),
    )


def _org(principal: Principal, slug: str, *, sees_all: bool) -> Org | None:
    if slug:
        return get_org(principal, slug)
    return None if sees_all else visible_orgs(principal).first()


def _fleet(principal: Principal) -> Fleet:
    lost = list(Driver.objects.filter(joined_at__isnull=False).values_list("lost_at", flat=True))
    ready = Q(state=NodeState.READY.value)
    told = Node.objects.aggregate(memory=Sum("memory_bytes", filter=ready), at=Max("last_heartbeat_at"))
    return Fleet(
        states=fleet.states(principal),
        drivers_alive=lost.count(None),
        drivers_lost=len(lost) - lost.count(None),
        memory_ready=told["memory"] or 0,
        last_seen_at=told["at"],
    )


def _streams(sessions: QuerySet[Session]) -> list[tuple[str, str, int]]:
    """Streams by path, the best path first."""
    counted = Stream.objects.filter(job__session__in=sessions).order_by("tier")
    return [
        (*TIERS[Tier(tier)], count) for tier, count in counted.values_list("tier").annotate(Count("pk"))
    ]


# Figures


def _figures(
    topic: str, told: CurrentFigures | None, gravest: list[Alert], memory_ready: int
) -> list[Figure]:
    end = int(time.time()) // 60 * 60
    current: Figures = told.figures if told else {}
    past = figures_past(topic, end - STEPS * STEP_SECONDS, STEP_SECONDS, STEPS)
    [yesterday] = figures_past(topic, end - STEP_SECONDS - DAY_SECONDS, STEP_SECONDS, 1)
    tiers = {name for figures in (current, *past) for name in figures if name.startswith("hit.")}
    names = [*NAMES, *sorted(tiers - set(NAMES)), *([SPINE] if topic == FLEET else []), MEMORY]
    alert_of = _alerts_by_figure(names, gravest)
    return [
        Figure(
            name=name,
            value=past[-1].get(MEMORY) if name == MEMORY else current.get(name),
            past=[figures.get(name) for figures in past],
            yesterday=yesterday.get(name),
            link=_link(topic, name),
            alert=alert_of.get(name),
            of=memory_ready if name == MEMORY else 0,
        )
        for name in names
    ]


def _link(topic: str, name: str) -> str:
    """The page that explains the figure."""
    if name == SPINE:
        return f"{reverse('alerts')}?{urlencode({'rule': 'spine-placement'})}"
    if name == MEMORY:
        return reverse("fleet-nodes") if topic == FLEET else reverse("org", args=[name_of(topic)])
    return f"{reverse('latency')}?{urlencode({'topic': topic})}"


def _alerts_by_figure(names: Sequence[str], gravest: list[Alert]) -> dict[str, Alert]:
    """The most severe alert by the first figure that its rule reads."""
    found: dict[str, Alert] = {}
    for alert in reversed(gravest):
        read = alert.definition.metrics if alert.definition else []
        first = next((name for name in names if _METRICS[name.partition(".")[0]] in read), None)
        if first:
            found[first] = alert
    return found
