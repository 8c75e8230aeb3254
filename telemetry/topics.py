"""Of whom numbers are told: a node, a driver, an org, the fleet. No Django.

    node:ax-7, driver:job7, ingest:host   of one process, with all labels
    org:acme                              of one org, summed up over drivers
    fleet                                 of all processes together

These are what pages show, what live viewers subscribe to, and what somebody may or may not see. So it is
by topic that numbers are stored: a page, or a chart, reads the rows of its topic and no others.
"""

from __future__ import annotations

from typing import Final

from telemetry.metrics import OTHER
from telemetry.shapes import Series

FLEET: Final = "fleet"
ALERTS: Final = "alerts"  # of events only
ORG: Final = "org"
# What names one place only: of no use in sums over all of them.
_OF_ONE_PLACE: Final = frozenset({"shard", "tag", "index"})
_KINDS: Final = {"agent": "node"}


def of_source(kind: str, name: str) -> str:
    return f"{_KINDS.get(kind, kind)}:{name}"


def of_org(org: str) -> str:
    return f"{ORG}:{org}"


def wider(series: Series) -> list[tuple[str, Series]]:
    """Where else a source's series is summed up, and as what."""
    labels = tuple(pair for pair in series.labels if pair[0] not in _OF_ONE_PLACE)
    without_org = series._replace(labels=tuple(pair for pair in labels if pair[0] != ORG))
    found = [(FLEET, without_org)]
    org = dict(series.labels).get(ORG, OTHER)
    return found if org in ("", OTHER) else [*found, (of_org(org), without_org)]
