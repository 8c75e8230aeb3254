"""How it has been: how often each rule fired, how soon somebody had it in hand, what was over by itself.

It is made from flips and from the audit trail, which both are kept; nothing is counted for it meanwhile.
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
from console.alerts.catalogue import BY_SLUG
from console.alerts.life import State
from console.alerts.models import Alert, Flip
from console.audit.models import AuditEntry
from console.visibility import of_orgs

DAYS: Final = (1, 7, 30, 90)
DAYS_DEFAULT: Final = 7
DAYS_MAX: Final = DAYS[-1]
EPISODES_MAX: Final = 50_000  # the newest; of more it is said so
SHORT: Final = timedelta(minutes=10)  # over so soon, and in nobody's hand: noise, most likely


@dataclass(slots=True)
class Episode:
    """One time that an alert fired. `over_at` is None while it does."""

    rule: str
    at: datetime
    over_at: datetime | None = None
    acknowledged_at: datetime | None = None

    @property
    def is_noise(self) -> bool:
        over = self.over_at
        return over is not None and self.acknowledged_at is None and over - self.at < SHORT

    @property
    def seconds_to_acknowledge(self) -> float | None:
        at = self.acknowledged_at
        return (at - self.at).total_seconds() if at else None

    @property
    def seconds_open(self) -> float | None:
        return (self.over_at - self.at).total_seconds() if self.over_at else None


@dataclass(frozen=True, slots=True)
class Row:
    """Of one rule, or of all."""

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
    rules: list[Row]  # the noisiest first
    left_out: bool


def statistics(principal: Principal, days: int) -> Statistics:
    """Of the alerts that they may see, since so many days."""
    now = timezone.now()
    since = now - timedelta(days=days)
    episodes, left_out = _episodes(principal, since)
    _acknowledge(episodes, since)
    by_rule: dict[str, list[Episode]] = defaultdict(list)
    for its in episodes.values():
        for episode in its:
            by_rule[episode.rule].append(episode)
    rules = [_row(rule, its) for rule, its in by_rule.items()]
    return Statistics(
        days,
        now,
        _row("", [episode for its in by_rule.values() for episode in its]),
        sorted(rules, key=lambda row: (-row.episodes, row.rule)),
        left_out,
    )


def _episodes(principal: Principal, since: datetime) -> tuple[dict[int, list[Episode]], bool]:
    """By alert, in the order of time; and whether some were too many. What began to fire before all
    this is not counted."""
    flips = Flip.objects.filter(at__gte=since, alert__in=Alert.objects.filter(of_orgs(principal)))
    its_own = {"alert": OuterRef("alert"), "episode": OuterRef("episode")}
    before = Flip.objects.filter(**its_own, at__lt=since, after=State.FIRING)
    rows = (
        flips.exclude(Exists(before))
        .values_list("alert_id", "alert__rule", "episode")
        .annotate(
            fired_at=Min("at", filter=Q(after=State.FIRING)),
            over_at=Min("at", filter=Q(after=State.RESOLVED)),
        )
        .filter(fired_at__isnull=False)
        .order_by("-fired_at")
    )
    newest = list(rows[: EPISODES_MAX + 1])
    found: dict[int, list[Episode]] = defaultdict(list)
    for alert_id, rule, _, fired_at, over_at in reversed(newest[:EPISODES_MAX]):
        found[alert_id].append(Episode(rule, fired_at, over_at))
    return found, len(newest) > EPISODES_MAX


def _acknowledge(episodes: Mapping[int, Sequence[Episode]], since: datetime) -> None:
    """Note when somebody first said to have it in hand, in the episode that this was in."""
    said = AuditEntry.objects.filter(action="alert.acknowledge", at__gte=since).order_by("at")
    for object_id, at in said.values_list("object_id", "at"):
        its = [one for one in episodes.get(int(object_id), ()) if one.at <= at]
        if its and its[-1].acknowledged_at is None and at <= (its[-1].over_at or at):
            its[-1].acknowledged_at = at


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
