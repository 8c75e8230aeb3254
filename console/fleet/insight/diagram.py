"""A stamp as a picture: what is plugged in, its leaves, and the spine's nearer end. Pure.

Only places are decided here, on paper as wide as `WIDTH`; how it looks is the template's and the style
sheet's. What stands in a row is in one row of the table beside it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

WIDTH: Final = 760
SPOT_X, SPOT_WIDTH = 4, 286
LEAF_X, LEAF_WIDTH = 400, 130
SPINE_X, SPINE_WIDTH = 636, 120
ROW: Final = 46
BOX_HEIGHT: Final = 38
SPOTS_MAX: Final = 36  # drawn one by one; beyond that, those that are well are drawn together
ODD_MAX: Final = 12  # of those that are not, for each group
NAME_CHARACTERS_MAX: Final = 26
NAMED_MAX: Final = 3

Look = Literal["ok", "warn", "bad", "off", "box"]


@dataclass(frozen=True, slots=True)
class Spot:
    """A node, a box, or many alike: something that is plugged in at leaves."""

    kind: Literal["node", "box"]
    name: str
    leaves: tuple[str, ...]
    look: Look
    said: str  # its state in words, or a box's domains
    detail: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Link:
    name: str
    leaf: str
    spine: str
    gbits: int
    streams: int = 0  # that cross the spine by its leaf

    @property
    def title(self) -> str:
        crossing = f"; streams that cross the spine by this leaf: {self.streams}" if self.streams else ""
        return f"{self.name}: {self.leaf} to {self.spine}, {self.gbits} Gbit/s{crossing}"


@dataclass(frozen=True, slots=True)
class Place:
    x: int
    y: int
    width: int
    name: str
    spot: Spot | None = None

    @property
    def middle(self) -> int:
        return self.y + BOX_HEIGHT // 2

    @property
    def short(self) -> str:
        most = NAME_CHARACTERS_MAX if self.spot else 15
        return self.name if len(self.name) <= most else f"{self.name[: most - 1]}…"


@dataclass(frozen=True, slots=True)
class Line:
    path: str
    kind: Literal["nic", "port", "spine", "crossed"]
    title: str


@dataclass(frozen=True)
class Drawing:
    height: int
    spines: Sequence[Place] = ()
    leaves: Sequence[Place] = ()
    spots: Sequence[Place] = ()
    lines: Sequence[Line] = ()
    width: int = field(default=WIDTH)


def draw(leaves: Iterable[str], links: Sequence[Link], spots: Sequence[Spot]) -> Drawing:
    """What is plugged in stands at the left, which small screens show first, in the order of its leaves;
    leaves stand in the middle of what they connect, and spine switches in the middle of their leaves."""
    shown = sorted(fold(spots), key=lambda spot: (spot.leaves, spot.kind, spot.count > 1, spot.name))
    plugged = [
        Place(SPOT_X, 4 + row * ROW, SPOT_WIDTH, spot.name, spot) for row, spot in enumerate(shown)
    ]
    wanted: dict[str, list[int]] = {leaf: [] for leaf in leaves}
    for place in plugged:
        for leaf in place.spot.leaves if place.spot else ():
            wanted.setdefault(leaf, []).append(place.y)
    in_the_middle = _column(LEAF_X, LEAF_WIDTH, wanted)
    ys = {place.name: place.y for place in in_the_middle}
    spines: dict[str, list[int]] = {}
    for link in links:
        spines.setdefault(link.spine, []).append(ys[link.leaf])
    at_the_spine = _column(SPINE_X, SPINE_WIDTH, spines)
    everything = [*plugged, *in_the_middle, *at_the_spine]
    height = max((place.y for place in everything), default=0) + ROW
    lines = [*_of_spine(at_the_spine, in_the_middle, links), *_of_spots(in_the_middle, plugged)]
    return Drawing(height, at_the_spine, in_the_middle, plugged, lines)


def fold(spots: Sequence[Spot]) -> list[Spot]:
    """Few are left as they are. Of many, those of a kind on the same leaves are one, but for nodes that
    are not well: those are what somebody looks for."""
    if len(spots) <= SPOTS_MAX:
        return list(spots)
    groups: dict[tuple[str, tuple[str, ...]], list[Spot]] = {}
    for spot in spots:
        groups.setdefault((spot.kind, spot.leaves), []).append(spot)
    shown: list[Spot] = []
    for group in groups.values():
        odd = [spot for spot in group if spot.look in ("warn", "bad")][:ODD_MAX]
        rest = [spot for spot in group if spot not in odd]
        shown += odd
        if len(rest) == 1:
            shown += rest
        elif rest:
            shown.append(_together(rest))
    return shown


def _together(spots: Sequence[Spot]) -> Spot:
    looks = {spot.look for spot in spots}
    look = next(one for one in ("bad", "warn", "ok", "box", "off") if one in looks)
    first = spots[0]
    what, said = ("nodes", states_of(spots)) if first.kind == "node" else ("boxes", _named(spots))
    return Spot(first.kind, f"{len(spots)} {what}", first.leaves, look, said, count=len(spots))


def states_of(spots: Iterable[Spot]) -> str:
    """`40 ready, 2 cordoned`: of nodes, the most first."""
    counts = Counter(spot.said for spot in spots if spot.kind == "node")
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count} {said}" for said, count in ordered)


def _named(spots: Sequence[Spot]) -> str:
    names = [spot.name for spot in spots]
    return ", ".join([*names[:NAMED_MAX], *(["…"] if len(names) > NAMED_MAX else [])])


def _column(x: int, width: int, wanted: Mapping[str, Sequence[int]]) -> list[Place]:
    """Each in the middle of where it is wanted, and none over another."""
    last = max((y for ys in wanted.values() for y in ys), default=0)
    middles = {name: sum(ys) // len(ys) if ys else last + ROW for name, ys in wanted.items()}
    places: list[Place] = []
    free = 4
    for name in sorted(middles, key=lambda name: (middles[name], name)):
        y = max(free, middles[name])
        places.append(Place(x, y, width, name))
        free = y + ROW
    return places


def _of_spine(spines: Sequence[Place], leaves: Sequence[Place], links: Sequence[Link]) -> list[Line]:
    spine_of = {place.name: place for place in spines}
    leaf_of = {place.name: place for place in leaves}
    return [
        Line(
            _curve(leaf_of[link.leaf], spine_of[link.spine]),
            "crossed" if link.streams else "spine",
            link.title,
        )
        for link in links
    ]


def _of_spots(leaves: Sequence[Place], spots: Sequence[Place]) -> list[Line]:
    leaf_of = {place.name: place for place in leaves}
    return [
        Line(
            _curve(place, leaf_of[leaf]),
            "nic" if place.spot.kind == "node" else "port",
            f"{place.name} on {leaf}",
        )
        for place in spots
        if place.spot
        for leaf in place.spot.leaves
    ]


def _curve(start: Place, end: Place) -> str:
    x1, x2 = start.x + start.width, end.x
    bend = (x1 + x2) // 2
    return f"M{x1} {start.middle}C{bend} {start.middle} {bend} {end.middle} {x2} {end.middle}"
