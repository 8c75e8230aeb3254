"""What explains what: an alert that is hidden is shown under its cause, and nobody is told of it.

`causes` is pure; `update` writes down what it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from console.alerts.life import OPEN, State
from console.alerts.models import Alert
from console.alerts.rules import World

# Whatever is said of numbers while none arrive, or are late, is the same thing said again.
LATE = "numbers-late"
NODE_CAUSE = "agent-silent"
LEAF_CAUSE = "leaf-down"
HIDES = (LATE, NODE_CAUSE, LEAF_CAUSE)


class Instance(Protocol):
    """What is needed of an alert."""

    pk: int
    rule: str
    state: str

    @property
    def all_labels(self) -> Mapping[str, str]: ...


def causes(alerts: Sequence[Instance], leaves: Mapping[str, tuple[str, ...]]) -> dict[int, int]:
    """Of each open alert that another one explains, that other one: the farthest cause of all.

    A leaf that is down explains its silent nodes, a silent node all else that is said of it, and numbers
    that do not arrive explain that nothing is known.
    """
    firing = [one for one in alerts if one.rule in HIDES and one.state == State.FIRING]
    by_leaf = {one.all_labels.get("leaf", ""): one.pk for one in firing if one.rule == LEAF_CAUSE}
    by_node = {one.all_labels.get("node", ""): one.pk for one in firing if one.rule == NODE_CAUSE}
    late = next((one.pk for one in firing if one.rule == LATE), None)
    return {
        one.pk: cause
        for one in alerts
        for cause in _of(one, by_leaf, by_node, late, leaves)
        if cause != one.pk
    }


def _of(
    one: Instance,
    by_leaf: Mapping[str, int],
    by_node: Mapping[str, int],
    late: int | None,
    leaves: Mapping[str, tuple[str, ...]],
) -> Iterator[int]:
    """The first that explains it, if any."""
    if one.rule == LEAF_CAUSE:
        return
    node = one.all_labels.get("node", "")
    down = [by_leaf[leaf] for leaf in leaves.get(f"node:{node}", ()) if leaf in by_leaf]
    if down:
        yield down[0]
    elif node in by_node and one.rule != NODE_CAUSE:
        yield by_node[node]
    elif late is not None and one.state == State.NO_DATA:
        yield late


def update(now: World) -> None:
    """Bring `hidden_by` up to date. Only rows that change are written."""
    alerts = list(
        Alert.objects.filter(state__in=OPEN).only(
            "pk", "rule", "state", "topic", "labels", "severity", "hidden_by"
        )
    )
    wanted = causes(alerts, now.leaves)
    for cause, hidden in _by_cause(alerts, wanted):
        Alert.objects.filter(pk__in=hidden).update(hidden_by=cause)
    Alert.objects.exclude(state__in=OPEN).exclude(hidden_by=None).update(hidden_by=None)


def _by_cause(
    alerts: Iterable[Alert], wanted: Mapping[int, int]
) -> Iterator[tuple[int | None, list[int]]]:
    changed: dict[int | None, list[int]] = {}
    for one in alerts:
        if wanted.get(one.pk) != one.hidden_by_id:
            changed.setdefault(wanted.get(one.pk), []).append(one.pk)
    yield from changed.items()
