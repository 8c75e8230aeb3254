"""What an org makes of its cache: of the last hour, in a few figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.utils import timezone

from console.accounts.principal import Principal
from console.fleet.models import Driver
from console.metrics.services import numbers, series
from console.orgs.models import Org
from console.policies.services import ActivePolicy
from console.sessions.driver_orgs import drivers_serving
from console.visibility import Sight
from swdriver_shim.daemon.metrics import HIT, ORG_BYTES, REQUESTED
from swdriver_shim.policy import Tiers
from telemetry.metrics import Metric
from telemetry.queries import TOPIC, TOPICS_MAX, Fold, Unanswerable
from telemetry.topics import of_org, of_source

SPAN: Final = timedelta(hours=1)
STEP: Final = 60
MODELS_MAX: Final = 5
OTHERS: Final = "models of shared sessions"
LESS_USED: Final = "other models"
DELETED: Final = "deleted models"


@dataclass(frozen=True, slots=True)
class OfModel:
    model: str
    requested: int
    hit: int

    @property
    def hit_rate(self) -> float:
        return self.hit / self.requested


@dataclass(frozen=True, slots=True)
class Usage:
    """`bytes` is None where no driver has told of the org lately; `quota` where it has none. `problem`:
    why the other figures are not known."""

    at: datetime
    bytes: int | None
    quota: int | None
    requested: int
    hit_rate: float | None
    models: list[OfModel]
    problem: str = ""

    @property
    def part(self) -> float | None:
        return self.bytes / self.quota if self.bytes is not None and self.quota else None


def usage(principal: Principal, held: ActivePolicy) -> Usage:
    """Models that they don't know of are not told apart."""
    now = timezone.now()
    org, sight = held.org, Sight(principal)
    drivers = list(drivers_serving(org).filter(joined_at__isnull=False).only("name", "model"))
    limits = [held.policies.of(driver.model_name).dram_bytes_max for driver in drivers]
    limited = [limit for limit in limits if limit is not None]
    quota = sum(limited) if limited and len(limited) == len(limits) else None
    model_of = {of_source("driver", one.name): _named(sight, one) for one in drivers}
    try:
        requested, hit = (_sum(org, metric, now) for metric in (REQUESTED, HIT))
        return Usage(
            at=now,
            bytes=_bytes(org, now),
            quota=quota,
            requested=requested,
            hit_rate=hit / requested if requested else None,
            models=_models(org, model_of, requested, hit, now),
        )
    except Unanswerable as error:
        return Usage(now, None, quota, 0, None, [], problem=str(error))


def restrictions(held: ActivePolicy) -> list[str]:
    """What is shown plainly of data that is held apart."""
    policy = held.policy
    told = []
    if policy.tiers is Tiers.NONE:
        told.append("Nothing is stored.")
    if policy.tiers is Tiers.DRAM:
        told.append("Nothing leaves memory.")
    if policy.tiers is Tiers.TIER2:
        told.append(f"Tier 2 is {'' if policy.encrypt_tier2 else 'not '}encrypted.")
    if policy.store_tokens_max is not None:
        told.append(f"Only the first {policy.store_tokens_max:,} tokens of each prompt are stored.")
    if policy.scrub:
        told.append("Memory is overwritten when columns are deleted.")
    told += [
        f"Of {model}, nothing is stored."
        for model, own in held.policies.models.items()
        if own.tiers is Tiers.NONE and policy.tiers is not Tiers.NONE
    ]
    return told


def _named(sight: Sight, driver: Driver) -> str:
    return driver.model_name if sight.knows_model(driver.model_name) else OTHERS


def _models(
    org: Org, model_of: Mapping[str, str], requested_in_all: int, hit_in_all: int, now: datetime
) -> list[OfModel]:
    """Those with most traffic, by the drivers that serve them; the others; and what was asked of drivers
    that are no longer there: all that was requested."""
    requested, hit = (_by_model(org, metric, model_of, now) for metric in (REQUESTED, HIT))
    ordered = sorted(requested, key=lambda model: (-requested[model], model))
    found = [OfModel(model, requested[model], hit.get(model, 0)) for model in ordered]
    shown, others = found[:MODELS_MAX], found[MODELS_MAX:]
    shown.append(_summed(LESS_USED, others))
    told = _summed("", found)
    shown.append(OfModel(DELETED, requested_in_all - told.requested, max(0, hit_in_all - told.hit)))
    return [one for one in shown if one.requested > 0]


def _summed(name: str, models: Sequence[OfModel]) -> OfModel:
    return OfModel(name, sum(one.requested for one in models), sum(one.hit for one in models))


def _by_model(org: Org, metric: Metric, model_of: Mapping[str, str], now: datetime) -> dict[str, int]:
    sums: dict[str, int] = {}
    found = series(
        "driver:*",
        metric,
        Fold.SUM,
        now - SPAN,
        now,
        STEP,
        TOPICS_MAX,
        topics=tuple(model_of),
        where={"org": org.slug},
        by=(TOPIC,),
    )
    for one in found:
        model = model_of[one.labels[TOPIC]]
        sums[model] = sums.get(model, 0) + round(sum(one.numbers))
    return sums


def _sum(org: Org, metric: Metric, now: datetime) -> int:
    return round(sum(numbers(of_org(org.slug), metric, Fold.SUM, now - SPAN, now, STEP)))


def _bytes(org: Org, now: datetime) -> int | None:
    known = numbers(of_org(org.slug), ORG_BYTES, Fold.TOTAL, now - timedelta(minutes=2), now, 10)
    return round(known[-1]) if known else None
