"""Of whom numbers are told: a node, a driver, an org, the fleet. No Django.

    node:ax-7, driver:job7, ingest:host   of one process, with all labels
    org:acme                              of one org, summed up over drivers
    session:chat                          of one session: what its streams move, by path
    fleet                                 of all processes together

These are what pages show, what live viewers subscribe to, and what somebody may or may not see. So it is
by topic that numbers are stored: a page, or a chart, reads the rows of its topic and no others.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from telemetry.metrics import OTHER
from telemetry.shapes import Series

Labels = tuple[tuple[str, str], ...]

FLEET: Final = "fleet"
ORG: Final = "org"
SESSION: Final = "session"
# What names one place only: of no use in sums over all of them.
_OF_ONE_PLACE: Final = frozenset({"shard", "tag", "index", "stream"})
_NOT_OF_THE_FLEET: Final = frozenset({ORG, "node", "box"})  # what crosses which leaves is what it asks
_KINDS: Final = {"agent": "node"}


def of_source(kind: str, name: str) -> str:
    return f"{_KINDS.get(kind, kind)}:{name}"


def of_org(org: str) -> str:
    return f"{ORG}:{org}"


def of_session(session: str) -> str:
    return f"{SESSION}:{session}"


def wider(series: Series) -> list[tuple[str, Series]]:
    """Where else a source's series is summed up, and as what."""
    labels, named = _without(series.labels, _OF_ONE_PLACE), dict(series.labels)
    found = [(FLEET, series._replace(labels=_without(labels, _NOT_OF_THE_FLEET)))]
    for kind, of in ((ORG, of_org), (SESSION, of_session)):
        if (name := named.get(kind, OTHER)) not in ("", OTHER):
            found.append((of(name), series._replace(labels=_without(labels, {kind}))))
    return found


def _without(labels: Labels, names: AbstractSet[str]) -> Labels:
    return tuple(pair for pair in labels if pair[0] not in names)
