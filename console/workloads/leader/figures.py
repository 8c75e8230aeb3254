"""The leader's metrics. Names and meanings: docs/metrics.md."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from telemetry.histogram import Histogram
from telemetry.metrics import Catalog, Sink, put

METRICS: Final = Catalog()
LEADS = METRICS.gauge("orchestrator_leads", "1 while this orchestrator is the leader.")
LED = METRICS.counter("orchestrator_elections_total", "How often this orchestrator became the leader.")
WORKLOADS = METRICS.gauge("orchestrator_workloads", "Workloads that the leader looks after.")
DECISIONS = METRICS.histogram(
    "orchestrator_decision_seconds", "Duration of looking at one workload and acting on it."
)
ACTIONS = METRICS.counter("orchestrator_actions_total", "What the leader did, by kind.", "kind")
FAULTS = METRICS.counter(
    "orchestrator_faults_total",
    "What the leader could not do and does again: by whom it asked: cluster, redis, console, telemetry; "
    "`workload` where it could not look after one.",
    "whom",
)
LAG = METRICS.histogram(
    "orchestrator_endpoint_lag_seconds",
    "Time from when an instance became ready until its endpoint was in Redis.",
)
CLUSTER = METRICS.gauge(
    "orchestrator_cluster_connected", "1 while the Cluster Server has reported lately."
)
REDIS = METRICS.gauge("orchestrator_redis_connected", "1 while Redis takes endpoints.")


@dataclass(slots=True)
class Figures:
    """Counted by one thread, and collected by any."""

    leads: bool = False
    led: int = 0
    workloads: int = 0
    is_cluster_there: bool = False
    is_redis_there: bool = False
    actions: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    decisions: Histogram = field(default_factory=Histogram)
    lag: Histogram = field(default_factory=Histogram)

    def collect(self, into: Sink) -> None:
        put(into, LEADS, int(self.leads))
        put(into, LED, self.led)
        put(into, WORKLOADS, self.workloads)
        put(into, DECISIONS, self.decisions)
        put(into, ACTIONS, self.actions)
        put(into, FAULTS, self.faults)
        put(into, LAG, self.lag)
        put(into, CLUSTER, int(self.is_cluster_there))
        put(into, REDIS, int(self.is_redis_there))
