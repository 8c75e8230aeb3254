"""An alert rule: the metrics it reads, its condition, its thresholds and its suggested fixes. Pure.

The rules themselves are in `catalogue`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlencode

from console.alerts.conditions.condition import Condition, Values
from console.alerts.state.lifecycle import Delays
from telemetry.queries import TOPIC, Fold, Question

TICK_SECONDS: Final = 10


class Severity(StrEnum):
    """How urgent an alert is, the most urgent first."""

    PAGE = "page"  # wakes somebody up
    TICKET = "ticket"  # for the next working day
    NOTICE = "notice"  # for information


class Scope(StrEnum):
    """The kind of object an alert is about: the first part of its topic."""

    ORG = "org"
    NODE = "node"
    DRIVER = "driver"
    BRAIN = "brain"
    SESSION = "session"
    WORKLOAD = "workload"
    LEAF = "leaf"
    FLEET = "fleet"


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number of a rule that can be set for the platform, or for an org if the rule is about orgs."""

    name: str  # ends with its unit
    default: float
    text: str
    low: float = 0
    high: float = 1e15

    @property
    def unit(self) -> str:
        """The last part of the name, if it is a measured unit."""
        last = self.name.rpartition("_")[2]
        return last if last in ("seconds", "share", "bytes") else ""


@dataclass(frozen=True, slots=True)
class MetricQuery:
    """What a rule reads: a metric over the last `seconds`, in steps, grouped by labels."""

    metric: str
    fold: Fold
    seconds: int = 60
    step: int = 10
    by: tuple[str, ...] = ()  # besides the topic
    where: Mapping[str, str] = field(default_factory=dict)
    over: str | None = None
    behind_seconds: int = 0  # how long before now it ends
    topic: str = ""  # may end with a star; empty: all of the rule's scope

    def address(self, topic: str, labels: Mapping[str, str]) -> str:
        """The API request that returns the same for one instance."""
        asked: list[tuple[str, str]] = [("topic", topic), ("name", self.metric), ("fold", self.fold)]
        if self.over:
            asked.append(("over", self.over))
        own = {name: labels[name] for name in self.by if name in labels}
        asked += [("label", f"{name}:{value}") for name, value in {**self.where, **own}.items()]
        return f"/api/v1/metrics/query?{urlencode(asked)}"

    def question(self, metrics: Mapping[str, Any], now: float) -> Question:
        """What telemetry is asked. It ends with the last complete ten seconds."""
        end = (now - self.behind_seconds) // TICK_SECONDS * TICK_SECONDS
        return Question(
            topic=self.topic,
            metric=metrics[self.metric],
            fold=self.fold,
            start=end - self.seconds,
            end=end,
            step=self.step,
            where=self.where,
            by=(TOPIC, *self.by),
            over=metrics[self.over] if self.over else None,
        )


def by_which(
    values: tuple[str, ...], metric: str, fold: Fold, seconds: int = 60, **where: str
) -> dict[str, MetricQuery]:
    """A query for each of these values of the label `which`."""
    return {one: MetricQuery(metric, fold, seconds, where={**where, "which": one}) for one in values}


def mean_and_count(name: str, metric: str, seconds: int, by: tuple[str, ...]) -> dict[str, MetricQuery]:
    """The mean of a histogram by the minute, and `NAME_count`: of how many."""
    return {
        name: MetricQuery(metric, Fold.MEAN, seconds, step=60, by=by),
        f"{name}_count": MetricQuery(metric, Fold.SUM, seconds, step=60, by=by),
    }


PENDING_SECONDS: Final = "pending_seconds"
KEEP_FIRING_SECONDS: Final = "keep_firing_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    slug: str
    title: str
    severity: Severity
    scope: Scope
    description: str  # one or two sentences
    unit: str = ""  # of the value and threshold of its alerts: seconds, share or a name
    suggested_fix: str  # for every case; `actions` are for the case at hand
    page: str = ""  # route of the page that the suggested fix mentions
    runbook: str = ""  # file in docs/runbooks; by default it has the name of the rule
    condition: Condition
    queries: Mapping[str, MetricQuery] = field(default_factory=dict)
    own_thresholds: tuple[Threshold, ...] = ()
    pending_seconds: float = 0
    keep_firing_seconds: float = 60
    every_seconds: int = TICK_SECONDS
    actions: tuple[str, ...] = ()  # names in `suggested_fixes.services` that may help
    ignores_missing_data: bool = False  # it does not go to no_data when a process stops reporting
    prometheus: tuple[str, ...] = ()  # the equivalent alerts in deploy/prometheus

    def __post_init__(self) -> None:
        topic = "fleet" if self.scope is Scope.FLEET else f"{self.scope}:*"
        asked = {name: replace(one, topic=one.topic or topic) for name, one in self.queries.items()}
        object.__setattr__(self, "queries", asked)
        object.__setattr__(self, "runbook", self.runbook or f"{self.slug}.md")

    @property
    def thresholds(self) -> tuple[Threshold, ...]:
        return (
            *self.own_thresholds,
            Threshold(
                PENDING_SECONDS,
                self.pending_seconds,
                "Pending period: how long the condition must hold before the alert fires.",
                high=86_400,
            ),
            Threshold(
                KEEP_FIRING_SECONDS,
                self.keep_firing_seconds,
                "How long the condition must be clear before the alert resolves.",
                high=86_400,
            ),
        )

    @property
    def defaults(self) -> dict[str, float]:
        return {one.name: one.default for one in self.thresholds}

    @property
    def metrics(self) -> list[str]:
        return sorted({query.metric for query in self.queries.values()})

    @property
    def per_org(self) -> bool:
        return self.scope is Scope.ORG


def delays(values: Values) -> Delays:
    return Delays(
        pending=timedelta(seconds=values[PENDING_SECONDS]),
        keep_firing=timedelta(seconds=values[KEEP_FIRING_SECONDS]),
    )
