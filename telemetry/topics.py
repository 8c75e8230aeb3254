"""Of whom numbers are told: a node, a driver, an org, the fleet. No Django.

    node:ax-7, driver:job7, ingest:host   of one process, with all labels; of a node also what drivers
                                          moved there, since shared memory passes its agent by
    org:acme                              of one org, summed up over drivers
    session:chat                          of one session: what its streams move, by path
    workload:chat                         no numbers; what becomes of one workload
    workloads                             no numbers; that something has become of one of them
    fleet                                 of all processes together
    operations                            no numbers; what begins and ends

These are what pages show, what live viewers subscribe to, and what somebody may or may not see. So it is
by topic that numbers are stored: a page, or a chart, reads the rows of its topic and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

from telemetry.metrics import OTHER
from telemetry.shapes import Series

Labels = tuple[tuple[str, str], ...]

FLEET: Final = "fleet"
ALERTS: Final = "alerts"  # of events only
OPERATIONS: Final = "operations"
WORKLOADS: Final = "workloads"
ORG: Final = "org"
SESSION: Final = "session"
WORKLOAD: Final = "workload"
NODE: Final = "node"
# What names one place only: of no use in sums over all of them.
_OF_ONE_PLACE: Final = frozenset({"shard", "tag", "index", "stream"})
_NOT_OF_ORGS: Final = frozenset({"replica"})  # which engines there are is the platform's
_NOT_OF_THE_FLEET: Final = frozenset({ORG, NODE, "box"})  # what crosses which leaves is what it asks
_KINDS: Final = {"agent": NODE}


def of_source(kind: str, name: str) -> str:
    return f"{_KINDS.get(kind, kind)}:{name}"


def of_org(org: str) -> str:
    return f"{ORG}:{org}"


def of_session(session: str) -> str:
    return f"{SESSION}:{session}"


def of_workload(workload: str) -> str:
    return f"{WORKLOAD}:{workload}"


def kind_of(topic: str) -> str:
    """`node` of `node:ax-7`; `fleet` of `fleet`."""
    return topic.partition(":")[0]


def wider(series: Series) -> list[tuple[str, Series]]:
    """Where else a source's series is summed up, and as what."""
    kind, name, labels = series
    labels = _without(labels, _OF_ONE_PLACE)
    found = [(FLEET, Series(kind, name, _without(labels, _NOT_OF_THE_FLEET)))]
    for label, value in labels:
        of = _SUMMED.get(label)
        if of and value not in ("", OTHER):
            left_out = {label} | _NOT_OF_ORGS if label == ORG else {label}
            found.append((of(value), Series(kind, name, _without(labels, left_out))))
    return found


def _without(labels: Labels, names: AbstractSet[str]) -> Labels:
    return tuple([pair for pair in labels if pair[0] not in names])


_SUMMED: Final[Mapping[str, Callable[[str], str]]] = {
    ORG: of_org,
    SESSION: of_session,
    NODE: partial(of_source, "agent"),
}
