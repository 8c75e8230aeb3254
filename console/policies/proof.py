"""What became of an org's columns: that nothing outlived its policy, and what was purged."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.utils import timezone

from console.control.services import applied
from console.orgs.models import Org
from console.policies import documents, services, words
from console.policies.models import PolicyVersion, PurgeReceipt
from console.policies.purges import receipts_of
from console.policies.services import InForce
from swdriver_shim.daemon.metrics import EXPIRED, ORG_BYTES, ORG_OVERSTAY
from telemetry.metrics import Metric
from telemetry.queries import Fold, Question, ask
from telemetry.topics import of_org

DAYS: Final = (1, 7, 30, 90)
TIERS: Final = ("dram", "tier2")
ROWS_MAX: Final = 500
_STEPS: Final = {1: 600, 7: 3600, 30: 3600, 90: 10_800}


@dataclass(frozen=True, slots=True)
class Report:
    """Of one org, in one span of time. None: no driver has told of it, which is not 0."""

    org: Org
    start: datetime
    end: datetime
    held: InForce
    expired: Mapping[str, int | None]  # columns, by tier
    overstay_seconds_max: float | None  # of bytes in memory; never served
    bytes_now: float | None
    versions: list[PolicyVersion]
    receipts: list[PurgeReceipt]
    drivers: int
    drivers_up_to_date: int

    @property
    def is_told_of(self) -> bool:
        return self.overstay_seconds_max is not None

    def statement(self) -> dict[str, Any]:
        """All of it in plain values, as it is signed."""
        return {
            "kind": "retention report",
            "org": self.org.slug,
            "from": _moment(self.start),
            "until": _moment(self.end),
            "policy": {
                "version": self.held.number,
                "in_words": words.sentence(self.held.policy),
                "document": documents.spelled_out(self.held.policies),
                "drivers": self.drivers,
                "drivers_that_have_it": self.drivers_up_to_date,
            },
            "overstay_seconds_max": self.overstay_seconds_max,
            "expired_columns": dict(self.expired),
            "policies": [
                {
                    "version": version.number,
                    "from": _moment(version.made_at),
                    "author": version.author_name,
                    "reason": version.reason,
                }
                for version in self.versions
            ],
            "purges": [receipt.statement() for receipt in self.receipts],
        }


def report(org: Org, days: int) -> Report:
    """Of the last so many days, which are one of DAYS."""
    end = timezone.now()
    start = end - timedelta(days=days)
    held = services.in_force(org)
    reach = applied(held.version.change if held.version else None)
    step = _STEPS[days]
    return Report(
        org=org,
        start=start,
        end=end,
        held=held,
        expired={tier: _count(org, start, end, step, tier) for tier in TIERS},
        overstay_seconds_max=_most(org, ORG_OVERSTAY, start, end, step),
        bytes_now=_most(org, ORG_BYTES, end - timedelta(minutes=1), end, 10, Fold.TOTAL),
        versions=_versions(org, start),
        receipts=list(receipts_of(org).filter(at__gte=start)[:ROWS_MAX]),
        drivers=len(reach.standings),
        drivers_up_to_date=reach.has_it,
    )


def _versions(org: Org, start: datetime) -> list[PolicyVersion]:
    """Those that were in force: made in this time, or the last one before it."""
    versions = services.versions_of(org)
    made = list(versions.filter(made_at__gte=start)[:ROWS_MAX])
    return [*made, *versions.filter(made_at__lt=start)[:1]]


def _count(org: Org, start: datetime, end: datetime, step: int, tier: str) -> int | None:
    told = list(_values(org, EXPIRED, Fold.SUM, start, end, step, {"tier": tier}))
    return round(sum(told)) if told else None


def _most(
    org: Org, metric: Metric, start: datetime, end: datetime, step: int, fold: Fold = Fold.MAX
) -> float | None:
    return max(_values(org, metric, fold, start, end, step), default=None)


def _values(
    org: Org,
    metric: Metric,
    fold: Fold,
    start: datetime,
    end: datetime,
    step: int,
    where: Mapping[str, str] | None = None,
) -> Iterator[float]:
    question = Question(
        topic=of_org(org.slug),
        metric=metric,
        fold=fold,
        start=start.timestamp(),
        end=end.timestamp(),
        step=step,
        where=where or {},
    )
    for line in ask(question, end.timestamp()).lines:
        yield from (float(value) for value in line.values if isinstance(value, int | float))


def as_csv(told: Report) -> str:
    """One fact a row: what, since when, until when, how much, and more."""
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(["fact", "from", "until", "value", "unit", "detail"])
    span = (_moment(told.start), _moment(told.end))
    rows.writerow(["overstay_max", *span, _cell(told.overstay_seconds_max), "seconds", ""])
    for tier, count in told.expired.items():
        rows.writerow(["expired", *span, _cell(count), "columns", tier])
    for version in told.versions:
        rows.writerow(
            ["policy", _moment(version.made_at), "", version.number, "version", _safe(version.reason)]
        )
    for receipt in told.receipts:
        rows.writerow(
            ["purge", _moment(receipt.at), "", receipt.columns, "columns", _safe(receipt.model or "all")]
        )
    return out.getvalue()


def _cell(value: float | None) -> str:
    return "not told" if value is None else f"{value:g}"


def _safe(text: str) -> str:
    """A spreadsheet is not to take it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
