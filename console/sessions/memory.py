"""How much of a session's memory the columns of each org take, as its drivers have told last."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from console.accounts.principal import Principal
from console.orgs.models import Org
from console.orgs.services import visible_orgs
from console.sessions.models import Session
from swdriver_shim.daemon.metrics import ORG_BYTES, OVERSTAY
from telemetry.metrics import Metric
from telemetry.queries import Answer, Fold, Question, ResultSeries, Unanswerable, ask
from telemetry.topics import of_source

log = logging.getLogger(__name__)

SPAN: Final = timedelta(minutes=2)  # what is older than that is not known to be so now
STEP: Final = 10
DRIVERS_MAX: Final = 32
ORGS_MAX: Final = 5_000  # of a driver


@dataclass(frozen=True, slots=True)
class OrgMemory:
    """By an org; without one, by all orgs that somebody may not know of."""

    org: Org | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    at: datetime | None  # when what is told last ends; None while nothing is
    by_org: tuple[OrgMemory, ...]  # those with most first
    is_whole: bool  # all drivers were asked, and have told what they have

    @property
    def bytes(self) -> int:
        return sum(taken.bytes for taken in self.by_org)


def memory_of(principal: Principal, session: Session, now: datetime) -> Memory:
    drivers = list(
        session.jobs.order_by("name").values_list("driver__name", flat=True)[: DRIVERS_MAX + 1]
    )
    taken: Counter[str] = Counter()
    until, is_whole = 0, len(drivers) <= DRIVERS_MAX
    for driver in drivers[:DRIVERS_MAX]:
        try:
            answer = _told_by(driver, ORG_BYTES, now)
            # One that has nothing of any org has told the other all the same.
            is_whole &= bool(answer.lines or _told_by(driver, OVERSTAY, now).lines)
        except Unanswerable as error:
            log.warning("What orgs take of driver %s is not known: %s", driver, error)
            is_whole = False
            continue
        for line in answer.lines:
            end, value = _last(answer, line)
            until = max(until, end)
            taken[line.labels["org"]] += value
    at = min(now, datetime.fromtimestamp(until, UTC)) if until else None
    rows = tuple(_by_org(taken, visible_orgs(principal).filter(slug__in=taken)))
    return Memory(at, rows, is_whole)


def _told_by(driver: str, metric: Metric, now: datetime) -> Answer:
    return ask(
        Question(
            topic=of_source("driver", driver),
            metric=metric,
            fold=Fold.MEAN,
            start=(now - SPAN).timestamp(),
            end=now.timestamp(),
            step=STEP,
            by=("org",) if "org" in metric.labels else (),
        ),
        now.timestamp(),
        ORGS_MAX,
    )


def _last(answer: Answer, line: ResultSeries) -> tuple[int, int]:
    """The end of the last step of which something is known, and what is."""
    for start, value in zip(reversed(answer.times), reversed(line.values), strict=True):
        if isinstance(value, int | float):
            return start + STEP, round(value)
    return 0, 0


def _by_org(taken: Counter[str], known: Iterable[Org]) -> Iterator[OrgMemory]:
    for org in sorted(known, key=lambda org: (-taken[org.slug], org.slug)):
        yield OrgMemory(org, taken.pop(org.slug))
    if others := taken.total():
        yield OrgMemory(None, others)
