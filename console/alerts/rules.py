"""What a rule is: what it reads, how it judges, from when on it is said, and what helps. Pure.

The rules themselves stand in `catalogue`. What they judge by is numbers of the telemetry, and a `World`:
who is there, who was heard, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlencode

from console.alerts.life import Patience, Verdict
from telemetry.queries import TOPIC, Fold, Question, ResultSeries

TICK_SECONDS: Final = 10
Values = Mapping[str, float]  # of a rule's limits, by their names
Tables = Mapping[str, list[ResultSeries]]  # of what was read, by the names of the readings


class Severity(StrEnum):
    """Whom it concerns, the gravest first."""

    PAGE = "page"  # somebody gets up
    TICKET = "ticket"  # somebody looks at it in the morning
    NOTICE = "notice"  # it is good to know


class Scope(StrEnum):
    """What kind of thing an instance is about: the beginning of its topic."""

    ORG = "org"
    NODE = "node"
    DRIVER = "driver"
    SESSION = "session"
    LEAF = "leaf"
    FLEET = "fleet"


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of a rule that people may set, for all or where that makes sense for an org."""

    name: str  # the unit is last
    default: float
    text: str
    low: float = 0
    high: float = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Numbers that a rule wants: a metric of the last `seconds`, in steps, told apart by labels."""

    topic: str  # or the beginning of several, and a star
    metric: str
    fold: Fold
    seconds: int = 60
    step: int = 10
    by: tuple[str, ...] = ()  # besides the topic
    where: Mapping[str, str] = field(default_factory=dict)
    over: str | None = None
    behind_seconds: int = 0  # how far before now it ends

    def address(self, topic: str, labels: Mapping[str, str]) -> str:
        """Where the API tells the same, of one instance."""
        asked: list[tuple[str, str]] = [("topic", topic), ("name", self.metric), ("fold", self.fold)]
        if self.over:
            asked.append(("over", self.over))
        its = {name: labels[name] for name in self.by if name in labels}
        asked += [("label", f"{name}:{value}") for name, value in {**self.where, **its}.items()]
        return f"/api/v1/metrics/query?{urlencode(asked)}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one instance now."""

    topic: str
    verdict: Verdict
    sentence: str
    value: float | None = None
    threshold: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)  # what tells it from others of the topic
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
    allowed: bool | None = None  # None where no session has rules for it
    why: str = ""  # it is not on a better path


@dataclass(frozen=True, slots=True)
class Standing:
    """What the console knows of a process that it tells what to be."""

    told: int  # the document that it should follow
    follows: int  # the one that it said it follows
    problem: str = ""  # why it does not, in a sentence
    fault: str = ""  # in what way its last answer was none
    faulty_since: datetime | None = None
    seen_at: datetime | None = None  # when its last valid answer came


@dataclass(frozen=True, slots=True)
class World:
    """Who there is, and when anything was heard of them, by topic. Who is in maintenance is left out."""

    at: datetime
    heard: Mapping[str, datetime] = field(default_factory=dict)
    expected: Mapping[str, datetime] = field(default_factory=dict)  # who has joined, and when
    leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of nodes, by their NICs
    crossings: tuple[Crossing, ...] = ()  # of sessions
    drivers_of_sessions: frozenset[str] = frozenset()
    link_gbits: Mapping[str, int] = field(default_factory=dict)
    standings: Mapping[str, Standing] = field(default_factory=dict)  # by topic
    plain_control: bool = False  # control APIs may be asked in plain text
    in_the_open: tuple[str, ...] = ()  # who is: "node ax-1"
    root_replaced_since: datetime | None = None  # the step that lasts
    root_not_followed: tuple[str, ...] = ()  # who is alive and does not, meanwhile
    missing_records: int = 0
    rolled_up_to: datetime | None = None

    @property
    def newest(self) -> datetime | None:
        return max(self.heard.values(), default=None)


LimitsOf = Callable[[str], Values]  # by topic
Judge = Callable[[Tables, World, LimitsOf], Iterable[Finding]]

BREACH_SECONDS: Final = "breach_seconds"
FINE_SECONDS: Final = "fine_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    slug: str
    title: str
    severity: Severity
    scope: Scope
    means: str  # a sentence
    remedy: str  # what would end it
    page: str = ""  # the route of the page that it speaks of
    runbook: str  # a page of docs/runbooks
    judge: Judge
    readings: Mapping[str, Reading] = field(default_factory=dict)
    own_limits: tuple[Limit, ...] = ()
    breach_seconds: float = 0
    fine_seconds: float = 60
    every_seconds: int = TICK_SECONDS
    fixes: tuple[str, ...] = ()  # of `remedies`, that may help
    outlives_silence: bool = False  # it is about silence, so that silence does not end it
    prometheus: tuple[str, ...] = ()  # alerts of deploy/prometheus that say the same

    @property
    def limits(self) -> tuple[Limit, ...]:
        return (
            *self.own_limits,
            Limit(
                BREACH_SECONDS,
                self.breach_seconds,
                "How long it has to last before it fires.",
                high=86_400,
            ),
            Limit(
                FINE_SECONDS,
                self.fine_seconds,
                "How long all has to be well before it is over.",
                high=86_400,
            ),
        )

    @property
    def defaults(self) -> dict[str, float]:
        return {limit.name: limit.default for limit in self.limits}

    @property
    def metrics(self) -> list[str]:
        return sorted({reading.metric for reading in self.readings.values()})

    @property
    def per_org(self) -> bool:
        return self.scope is Scope.ORG


def patience(values: Values) -> Patience:
    return Patience(timedelta(seconds=values[BREACH_SECONDS]), timedelta(seconds=values[FINE_SECONDS]))


def name_of(topic: str) -> str:
    """`node:ax-7` → `ax-7`; the fleet is its own name."""
    return topic.partition(":")[2] or topic


def question(reading: Reading, metrics: Mapping[str, Any], now: float) -> Question:
    """What telemetry is asked. It ends where the last ten seconds that are over end."""
    end = (now - reading.behind_seconds) // TICK_SECONDS * TICK_SECONDS
    return Question(
        topic=reading.topic,
        metric=metrics[reading.metric],
        fold=reading.fold,
        start=end - reading.seconds,
        end=end,
        step=reading.step,
        where=reading.where,
        by=(TOPIC, *reading.by),
        over=metrics[reading.over] if reading.over else None,
    )
