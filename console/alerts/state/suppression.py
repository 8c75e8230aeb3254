"""Suppression: an alert with a known cause is shown under that cause, and sends no notification.

`causes` is pure; `update` stores its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from console.alerts.conditions.condition import Snapshot
from console.alerts.models import Alert
from console.alerts.state.lifecycle import OPEN, State

TELEMETRY_LATE: Final = "telemetry-late"
NODE_CAUSE: Final = "agent-not-reporting"
LEAF_CAUSE: Final = "leaf-down"
NOT_REPLACED: Final = "lost-node-not-replaced"  # pages, while its cause does not
CAUSES: Final = (TELEMETRY_LATE, NODE_CAUSE, LEAF_CAUSE)


class Instance(Protocol):
    """The part of an alert that `causes` needs."""

    pk: int
    rule: str
    state: str

    @property
    def all_labels(self) -> Mapping[str, str]: ...


def causes(alerts: Sequence[Instance], leaves: Mapping[str, tuple[str, ...]]) -> dict[int, int]:
    """The root cause of each open alert that has one.

    A leaf that is down causes its nodes not to report, a node that does not report causes its other
    alerts, and late telemetry causes no_data.
    """
    firing = [one for one in alerts if one.rule in CAUSES and one.state == State.FIRING]
    by_leaf = {one.all_labels.get("leaf", ""): one.pk for one in firing if one.rule == LEAF_CAUSE}
    by_node = {one.all_labels.get("node", ""): one.pk for one in firing if one.rule == NODE_CAUSE}
    late = next((one.pk for one in firing if one.rule == TELEMETRY_LATE), None)
    return {
        one.pk: cause
        for one in alerts
        for cause in _cause(one, by_leaf, by_node, late, leaves)
        if cause != one.pk
    }


def _cause(
    one: Instance,
    by_leaf: Mapping[str, int],
    by_node: Mapping[str, int],
    late: int | None,
    leaves: Mapping[str, tuple[str, ...]],
) -> Iterator[int]:
    """At most one."""
    if one.rule == LEAF_CAUSE:
        return
    node = one.all_labels.get("node", "")
    down = [by_leaf[leaf] for leaf in leaves.get(f"node:{node}", ()) if leaf in by_leaf]
    if down:
        yield down[0]
    elif node in by_node and one.rule not in (NODE_CAUSE, NOT_REPLACED):
        yield by_node[node]
    elif late is not None and one.state == State.NO_DATA:
        yield late


def update(now: Snapshot) -> None:
    """Store the cause of each open alert. Writes only the rows that change."""
    fields = ("pk", "rule", "state", "topic", "labels", "severity", "suppressed_by")
    alerts = list(Alert.objects.filter(state__in=OPEN).only(*fields))
    for cause, suppressed in _by_cause(alerts, causes(alerts, now.leaves)).items():
        Alert.objects.filter(pk__in=suppressed).update(suppressed_by=cause)
    Alert.objects.exclude(state__in=OPEN).exclude(suppressed_by=None).update(suppressed_by=None)


def _by_cause(alerts: Iterable[Alert], wanted: Mapping[int, int]) -> dict[int | None, list[int]]:
    changed: dict[int | None, list[int]] = {}
    for one in alerts:
        if wanted.get(one.pk) != one.suppressed_by_id:
            changed.setdefault(wanted.get(one.pk), []).append(one.pk)
    return changed
