"""What conditions read and return. Pure.

A condition reads telemetry tables and a `Snapshot` of the fleet, and returns one `Finding` per instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from console.alerts.state.lifecycle import Verdict
from telemetry.queries import ResultSeries

Values = Mapping[str, float]  # thresholds of a rule, by name
Tables = Mapping[str, list[ResultSeries]]  # query results, by the name of the query


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known about one instance now."""

    topic: str
    verdict: Verdict
    sentence: str
    value: float | None = None
    threshold: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)  # identify it within its topic
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A stream that is placed across the spine."""

    session: str
    driver: str
    stream: str  # "group.index" of the driver
    box: str
    node: str
    port_leaf: str
    nic_leaf: str
    link: str = ""
    shard: str = ""
    allowed: bool | None = None  # None if no session has rules for it
    why: str = ""  # the reason that it is not on a better path


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node of a session that is lost, and what is done about its streams."""

    session: str
    node: str
    verdict: str  # console.sessions.plans.losses.Verdict
    sentence: str
    since: datetime


@dataclass(frozen=True, slots=True)
class WithoutHolders:
    """Shards that are not stored with the redundancy that session rules ask for."""

    code: str
    instead: str  # the cluster's, which they have; empty: none
    shards: int
    why: str  # of the first of them, a sentence


@dataclass(frozen=True, slots=True)
class TargetState:
    """An agent or driver as the console last saw it."""

    desired: int  # generation
    observed: int  # generation
    problem: str = ""  # why it has not applied the desired generation, in a sentence
    fault: str = ""  # kind of its last invalid answer
    fault_since: datetime | None = None
    answered_at: datetime | None = None  # last valid answer


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The latest one of a workload."""

    revision: int
    phase: str
    reason: str
    sentence: str
    switched: int
    total: int
    started_at: datetime
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """A workload as the orchestrator last wrote it."""

    name: str
    replicas: int
    ready_replicas: int = 0
    not_ready_since: datetime | None = None  # None if it is ready, or nobody knows
    reason: str = ""
    message: str = ""
    instances: tuple[str, ...] = ()  # those that are not ready, with their states
    rollout: RolloutState | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at one moment, by topic, without nodes in maintenance."""

    at: datetime
    last_seen: Mapping[str, datetime] = field(default_factory=dict)
    joined: Mapping[str, datetime] = field(default_factory=dict)
    leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of each node's NICs
    crossings: tuple[Crossing, ...] = ()  # of sessions
    session_drivers: frozenset[str] = frozenset()
    lost_nodes: tuple[LostNode, ...] = ()
    without_holders: tuple[WithoutHolders, ...] = ()
    redundant_nodes: frozenset[str] = frozenset()  # with streams that are stored with redundancy
    replicas: frozenset[tuple[str, str]] = frozenset()  # model as clients send it, replica
    link_gbits: Mapping[str, int] = field(default_factory=dict)
    targets: Mapping[str, TargetState] = field(default_factory=dict)
    plaintext_control: bool = False  # TIDEGATE_PLAIN_CONTROL
    plaintext_targets: tuple[str, ...] = ()  # "node ax-1"
    root_replacement_since: datetime | None = None  # start of the current step
    root_replacement_pending: tuple[str, ...] = ()  # live processes that the step waits for
    missing_records: int = 0
    not_received: tuple[datetime, datetime] | None = None  # the last time in which no ingest ran
    rolled_up_to: datetime | None = None
    workloads: tuple[WorkloadState, ...] = ()  # without those that are being deleted
    has_leader: bool = False  # of orchestrators
    cluster_silent_since: datetime | None = None  # as the leader says

    @property
    def newest_report(self) -> datetime | None:
        return max(self.last_seen.values(), default=None)


ValuesOf = Callable[[str], Values]  # by topic
Condition = Callable[[Tables, Snapshot, ValuesOf], Iterable[Finding]]


def verdict(*, breach: bool) -> Verdict:
    return Verdict.BREACH if breach else Verdict.OK


def name_of(topic: str) -> str:
    """`ax-7` for `node:ax-7`, and `fleet` for `fleet`."""
    return topic.partition(":")[2] or topic
