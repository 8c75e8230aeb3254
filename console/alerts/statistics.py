"""Statistics of alerts: how often each rule fired, time to acknowledge, time to resolve, noise.

They are computed from transitions and the audit trail; nothing else is stored for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Final

from django.db.models import Exists, Min, OuterRef, Q
from django.utils import timezone

from console.accounts.principal import Principal
from console.alerts.models import Alert, Transition
from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.state.lifecycle import State
from console.audit.models import AuditEntry
from console.visibility import of_orgs

DAYS: Final = (1, 7, 30, 90)
DAYS_DEFAULT: Final = 7
DAYS_MAX: Final = DAYS[-1]
EPISODES_MAX: Final = 50_000  # only the newest are counted
SHORT: Final = timedelta(minutes=10)  # resolved sooner and never acknowledged: noise


@dataclass(slots=True)
class Episode:
    """One episode in which an alert fired."""

    rule: str
    at: datetime
    resolved_at: datetime | None = None
    acknowledged_at: datetime | None = None

    @property
    def is_noise(self) -> bool:
        resolved = self.resolved_at
        return resolved is not None and self.acknowledged_at is None and resolved - self.at < SHORT

    @property
    def seconds_to_acknowledge(self) -> float | None:
        at = self.acknowledged_at
        return (at - self.at).total_seconds() if at else None

    @property
    def seconds_open(self) -> float | None:
        return (self.resolved_at - self.at).total_seconds() if self.resolved_at else None


@dataclass(frozen=True, slots=True)
class Row:
    """Statistics of one rule, or of all."""

    rule: str
    episodes: int
    acknowledged: int
    noise: int
    seconds_to_acknowledge: float | None  # the median
    seconds_open: float | None

    @property
    def title(self) -> str:
        return BY_SLUG[self.rule].title if self.rule in BY_SLUG else self.rule


@dataclass(frozen=True, slots=True)
class Statistics:
    days: int
    at: datetime
    all: Row
    rules: list[Row]  # those that fired most first
    left_out: bool


def statistics(principal: Principal, days: int) -> Statistics:
    """Statistics of the alerts that they may see, over the last days."""
    now = timezone.now()
    since = now - timedelta(days=days)
    episodes, left_out = _episodes(principal, since)
    _acknowledge(episodes, since)
    by_rule: dict[str, list[Episode]] = defaultdict(list)
    for group in episodes.values():
        for episode in group:
            by_rule[episode.rule].append(episode)
    rules = [_row(rule, group) for rule, group in by_rule.items()]
    return Statistics(
        days,
        now,
        _row("", [episode for group in by_rule.values() for episode in group]),
        sorted(rules, key=lambda row: (-row.episodes, row.rule)),
        left_out,
    )


def _episodes(principal: Principal, since: datetime) -> tuple[dict[int, list[Episode]], bool]:
    """By alert, the oldest first; and whether some were left out. Episodes that began earlier are not
    counted."""
    transitions = Transition.objects.filter(
        at__gte=since, alert__in=Alert.objects.filter(of_orgs(principal))
    )
    same = {"alert": OuterRef("alert"), "episode": OuterRef("episode")}
    before = Transition.objects.filter(**same, at__lt=since, after=State.FIRING)
    rows = (
        transitions.exclude(Exists(before))
        .values_list("alert_id", "alert__rule", "episode")
        .annotate(
            fired_at=Min("at", filter=Q(after=State.FIRING)),
            resolved_at=Min("at", filter=Q(after=State.RESOLVED)),
        )
        .filter(fired_at__isnull=False)
        .order_by("-fired_at")
    )
    newest = list(rows[: EPISODES_MAX + 1])
    found: dict[int, list[Episode]] = defaultdict(list)
    for alert_id, rule, _, fired_at, resolved_at in reversed(newest[:EPISODES_MAX]):
        found[alert_id].append(Episode(rule, fired_at, resolved_at))
    return found, len(newest) > EPISODES_MAX


def _acknowledge(episodes: Mapping[int, Sequence[Episode]], since: datetime) -> None:
    """Set the time of the first acknowledgement of each episode."""
    entries = AuditEntry.objects.filter(action="alert.acknowledge", at__gte=since).order_by("at")
    for object_id, at in entries.values_list("object_id", "at"):
        earlier = [one for one in episodes.get(int(object_id), ()) if one.at <= at]
        if earlier and earlier[-1].acknowledged_at is None and at <= (earlier[-1].resolved_at or at):
            earlier[-1].acknowledged_at = at


def _row(rule: str, episodes: Sequence[Episode]) -> Row:
    return Row(
        rule,
        len(episodes),
        sum(one.acknowledged_at is not None for one in episodes),
        sum(one.is_noise for one in episodes),
        _median(one.seconds_to_acknowledge for one in episodes),
        _median(one.seconds_open for one in episodes),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
