"""What became of an org's columns: that nothing outlived its policy, and what was purged."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.utils import timezone

from console.metrics.services import numbers
from console.orgs.models import Org
from console.policies import documents, sentences, services
from console.policies.evidence.receipts import receipts_of
from console.policies.models import PolicyVersion, PurgeReceipt
from console.policies.rollout import applied_on
from console.policies.services import ActivePolicy
from kvss_agent.metrics import TIER2_OVERSTAY
from swdriver_shim.daemon.metrics import EXPIRED, ORG_BYTES, ORG_OVERSTAY
from telemetry.metrics import Metric
from telemetry.queries import Fold, harmless
from telemetry.topics import FLEET, of_org

DAYS: Final = (1, 7, 30, 90)
TIERS: Final = ("dram", "tier2")
ROWS_MAX: Final = 500  # versions, and purges; how many more there are is said
# By tier: what the figures stand for, on the page and in what is signed.
OVERSTAY: Final = {
    "dram": "The longest time that bytes stayed in memory past their TTL. They were not served: every "
    "look-up checks the TTL.",
    "tier2": "The longest time that any org's file stayed past its TTL: agents do not tell orgs apart. "
    "Its TTL there is the longest that a policy of its org allows. It was not served.",
}
EXPIRED_COLUMNS: Final = {
    "dram": "Columns that expired in memory.",
    "tier2": "Columns that expired in files, as far as drivers knew of them. Files that no driver knows "
    "any more are removed by agents, and are not in this count.",
}
_STEPS: Final = {1: 600, 7: 3600, 30: 3600, 90: 10_800}


@dataclass(frozen=True, slots=True)
class Report:
    """Of one org, in one span of time. None: no driver has told of it, which is not 0."""

    org: Org
    start: datetime
    end: datetime
    held: ActivePolicy
    overstay: Mapping[str, float | None]  # seconds at most, by tier; see OVERSTAY
    expired: Mapping[str, int | None]  # columns, by tier; see EXPIRED_COLUMNS
    bytes_now: float | None
    versions: list[PolicyVersion]
    defaults: list[PolicyVersion]  # of the cluster's default and limits, from which it follows, too
    receipts: list[PurgeReceipt]
    versions_left_out: int
    defaults_left_out: int
    receipts_left_out: int
    drivers: int
    drivers_up_to_date: int

    @property
    def is_told_of(self) -> bool:
        return self.overstay["dram"] is not None

    @property
    def overstays(self) -> list[tuple[str, float | None, str]]:
        """By tier, with what the figure stands for; likewise `expiries`."""
        return [(tier, self.overstay[tier], OVERSTAY[tier]) for tier in TIERS]

    @property
    def expiries(self) -> list[tuple[str, int | None, str]]:
        return [(tier, self.expired[tier], EXPIRED_COLUMNS[tier]) for tier in TIERS]

    def statement(self) -> dict[str, Any]:
        """All of it in plain values, as it is signed."""
        return {
            "kind": "retention report",
            "org": self.org.slug,
            "from": _moment(self.start),
            "until": _moment(self.end),
            "policy": {
                "version": self.held.number,
                "in_words": sentences.sentence(self.held.policy),
                "document": documents.spelled_out(self.held.policies),
                "drivers": self.drivers,
                "drivers_that_have_it": self.drivers_up_to_date,
            },
            "overstay_seconds_max": dict(self.overstay),
            "expired_columns": dict(self.expired),
            "meaning": {"overstay_seconds_max": OVERSTAY, "expired_columns": EXPIRED_COLUMNS},
            "policies": [
                {
                    "version": version.number,
                    "from": _moment(version.made_at),
                    "author": version.author_name,
                    "reason": version.reason,
                }
                for version in self.versions
            ],
            "policies_left_out": self.versions_left_out,
            "default_policies": [
                {"version": version.number, "from": _moment(version.made_at)}
                for version in self.defaults
            ],
            "default_policies_left_out": self.defaults_left_out,
            "purges": [receipt.statement() for receipt in self.receipts],
            "purges_left_out": self.receipts_left_out,
        }


def report(org: Org, days: int) -> Report:
    """Of the last so many days, which are one of DAYS."""
    end = timezone.now()
    start = end - timedelta(days=days)
    held = services.active_policy(org)
    reach = applied_on(held)
    step, topic = _STEPS[days], of_org(org.slug)
    versions, versions_left_out = _in_force(org, start)
    defaults, defaults_left_out = _in_force(None, start)
    receipts = receipts_of(org).filter(at__gte=start)
    return Report(
        org=org,
        start=start,
        end=end,
        held=held,
        overstay={
            "dram": _most(topic, ORG_OVERSTAY, start, end, step),
            "tier2": _most(FLEET, TIER2_OVERSTAY, start, end, step),
        },
        expired={tier: _count(topic, start, end, step, tier) for tier in TIERS},
        bytes_now=_most(topic, ORG_BYTES, end - timedelta(minutes=1), end, 10, Fold.TOTAL),
        versions=versions,
        defaults=defaults,
        receipts=list(receipts[:ROWS_MAX]),
        versions_left_out=versions_left_out,
        defaults_left_out=defaults_left_out,
        receipts_left_out=max(0, receipts.count() - ROWS_MAX),
        drivers=len(reach.standings),
        drivers_up_to_date=reach.has_it,
    )


def _in_force(org: Org | None, start: datetime) -> tuple[list[PolicyVersion], int]:
    """The newest versions that were in force, made in this time or the last before it; and how many
    more there were."""
    versions = services.versions_of(org)
    made, before = versions.filter(made_at__gte=start), versions.filter(made_at__lt=start)[:1]
    found = [*made[:ROWS_MAX], *before]
    return found[:ROWS_MAX], made.count() + len(before) - len(found[:ROWS_MAX])


def _count(topic: str, start: datetime, end: datetime, step: int, tier: str) -> int | None:
    told = numbers(topic, EXPIRED, Fold.SUM, start, end, step, where={"tier": tier})
    return round(sum(told)) if told else None


def _most(
    topic: str, metric: Metric, start: datetime, end: datetime, step: int, fold: Fold = Fold.MAX
) -> float | None:
    return max(numbers(topic, metric, fold, start, end, step), default=None)


def as_csv(told: Report) -> str:
    """One fact a row: what, since when, until when, how much, and more."""
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(["fact", "from", "until", "value", "unit", "detail"])
    span = (_moment(told.start), _moment(told.end))
    for tier, seconds, meaning in told.overstays:
        rows.writerow(["overstay_max", *span, _cell(seconds), "seconds", f"{tier}: {meaning}"])
    for tier, count, meaning in told.expiries:
        rows.writerow(["expired", *span, _cell(count), "columns", f"{tier}: {meaning}"])
    for version in told.versions:
        rows.writerow(
            ["policy", _moment(version.made_at), "", version.number, "version", harmless(version.reason)]
        )
    for version in told.defaults:
        rows.writerow(["default_policy", _moment(version.made_at), "", version.number, "version", ""])
    left_out = {
        "policy": told.versions_left_out,
        "default_policy": told.defaults_left_out,
        "purge": told.receipts_left_out,
    }
    for what, count in left_out.items():
        if count:
            rows.writerow([f"{what}_left_out", *span, count, "rows", f"The newest {ROWS_MAX} are here."])
    for receipt in told.receipts:
        rows.writerow(
            [
                "purge",
                _moment(receipt.at),
                "",
                receipt.columns,
                "columns",
                harmless(receipt.model or "all"),
            ]
        )
    return out.getvalue()


def _cell(value: float | None) -> str:
    return "not told" if value is None else f"{value:g}"


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
