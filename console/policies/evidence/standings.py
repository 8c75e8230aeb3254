"""Who has confirmed a removal and who has not, as people of the platform and of the org may see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from console.policies.evidence.confirmations import COUNTS, NOT_OWN

OTHERS: Final = {
    "drivers": ("a driver of another session", NOT_OWN),
    "nodes": ("a node of the fleet", "nodes of the fleet"),
    "brains": ("a brain", "brains"),
}
REMOVED: Final = {
    "driver": "a driver",
    "node": "a node",
    "brain": "a brain",
    "store": "a store of a node",
}
STANDINGS_MAX: Final = 200  # on a page


def _named(removed: Mapping[str, str]) -> str:
    of = "store of node" if removed["kind"] == "store" else removed["kind"]
    return f"{of} {removed['name']}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether somebody has confirmed a purge, when, of how much, and why not. `name` is for whoever may
    know it: a driver of the org's own sessions, or all for people of the platform."""

    name: str
    done: bool
    at: datetime | None
    counts: Mapping[str, int]
    problem: str
    removed_at: datetime | None = None  # from the fleet, before it confirmed
    was_replaced: bool = False  # it was not removed: another machine has its name since then
    may_have_key: bool = False  # what it was told may still be in its state directory


def standings_of(places: Mapping[str, Any], own: Collection[str], *, is_staff: bool) -> list[Standing]:
    """Of a receipt's places, or of a running purge's notes; those that have not confirmed first."""
    found = [
        Standing(
            name=_named(one) if one["name"] and is_staff else REMOVED[one["kind"]],
            done=False,
            at=None,
            counts={},
            problem="",
            removed_at=datetime.fromisoformat(one["removed_at"]),
            was_replaced=bool(one.get("replaced")),
            may_have_key=one["kind"] == "driver",
        )
        for one in places.get("removed", ())
    ]
    for kind in OTHERS:
        others: dict[bool, list[Mapping[str, Any]]] = {}
        for name, one in places.get(kind, {}).items():
            if name != NOT_OWN and (is_staff or (kind == "drivers" and name in own)):
                found.append(
                    _standing(f"{kind.removesuffix('s')} {name}", [one], one.get("problem", ""))
                )
            else:
                others.setdefault(bool(one.get("done")), []).append(one)
        found += [_standing(_unnamed(kind, ones), ones) for ones in others.values()]
    return sorted(found, key=lambda one: (one.done, one.name))[:STANDINGS_MAX]


def _unnamed(kind: str, ones: Collection[Mapping[str, Any]]) -> str:
    count = sum(one.get("drivers", 1) for one in ones)
    return OTHERS[kind][0] if count == 1 else f"{count} {OTHERS[kind][1]}"


def _standing(name: str, ones: Collection[Mapping[str, Any]], problem: str = "") -> Standing:
    """Of one, or of several that are like it and are not named."""
    confirmed = [one["confirmed_at"] for one in ones if one.get("confirmed_at")]
    return Standing(
        name=name,
        done=all(one.get("done") for one in ones),
        at=max(map(datetime.fromisoformat, confirmed), default=None),
        counts={count: sum(one.get(count, 0) for one in ones) for count in COUNTS},
        problem=str(problem),
    )
