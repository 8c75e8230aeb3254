"""Hit rate against time to live, or against memory, as an SVG and its table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Final

from swdriver_shim.cache.reuse.preview import Point, SweetSpot, sweet_spot
from telemetry.units import exact_duration, size

WIDTH: Final = 420
HEIGHT: Final = 184
LEFT: Final = 40
RIGHT: Final = 12
TOP: Final = 36
BOTTOM: Final = 26
WHAT: Final = {"dram_bytes_max": "memory", "tier2_bytes_max": "tier 2"}


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line: where the policy stands now, or would."""

    name: str
    x: float
    text: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Sweet:
    """Where the curve bends most, and the field of the form that this size is for."""

    x: float
    y: float
    at: int
    size: str
    what: str  # it is a size of
    field: str
    first: str  # the ends of the curve, and the points of hit rate from and to them
    last: str
    before: float
    beyond: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Ready to be drawn, in a box of WIDTH by HEIGHT. `rows` is the same as a table."""

    title: str
    line: str
    dots: list[tuple[float, float]]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    marks: list[Mark]
    sweet: Sweet | None
    rows: list[tuple[str, float, bool]]  # and whether it is the sweet spot
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    bottom: int = HEIGHT - BOTTOM
    right: int = WIDTH - RIGHT
    top: int = TOP


def by_time(points: Sequence[Point], now: int | None, proposed: int | None) -> Curve | None:
    return _curve("Hit rate by time to live", points, now, proposed, exact_duration)


def by_memory(points: Sequence[Point], now: int | None, proposed: int | None) -> Curve | None:
    return _curve("Hit rate by memory", points, now, proposed, size, "dram_bytes_max")


def by_tier2(
    points: Sequence[Point], now: int | None, proposed: int | None, *, is_used_now: bool
) -> Curve | None:
    drawn = _curve("Hit rate by tier 2", points, now, proposed, size, "tier2_bytes_max")
    if drawn and not is_used_now:
        return replace(drawn, marks=[mark for mark in drawn.marks if mark.name != "now"])
    return drawn


def _curve(
    title: str,
    points: Sequence[Point],
    now: int | None,
    proposed: int | None,
    show: Callable[[int], str],
    field: str = "",
) -> Curve | None:
    """None where there is nothing to draw a line between. A mark of None is beyond the right end.
    `field`: of the form, for a curve over bytes, which may have a sweet spot."""
    if len(points) < 2:
        return None
    low, high = log2(max(1, points[0].at)), log2(max(2, points[-1].at))
    lowest = min(point.hit_rate for point in points)
    highest = max(point.hit_rate for point in points)
    floor, ceiling = _bounds(lowest, highest)

    def x(at: int | None) -> float:
        part = 1.0 if at is None else (log2(max(1, at)) - low) / ((high - low) or 1.0)
        return round(LEFT + min(1.0, max(0.0, part)) * (WIDTH - LEFT - RIGHT), 1)

    def y(rate: float) -> float:
        part = (rate - floor) / (ceiling - floor)
        return round(HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM), 1)

    def text(name: str, at: int | None) -> str:
        """A mark that is beyond an end of the curve says where it would be."""
        if at is not None and at < points[0].at:
            return f"← {name}: {show(at)}"
        if at is not None and at > points[-1].at:
            return f"{name}: {show(at)} →"
        return name

    best = sweet_spot(points) if field else None
    dots = [(x(point.at), y(point.hit_rate)) for point in points]
    steps = [floor, (floor + ceiling) / 2, ceiling]
    marks = [("now", now)] if now == proposed else [("now", now), ("then", proposed)]
    return Curve(
        title=title,
        line=" ".join(f"{across},{down}" for across, down in dots),
        dots=dots,
        x_ticks=[Tick(x(point.at), show(point.at)) for point in (points[0], points[-1])],
        y_ticks=[Tick(y(rate), f"{100 * rate:.0f} %") for rate in steps],
        marks=[
            Mark(name, x(at), text(name, at), "end" if x(at) > WIDTH / 2 else "start")
            for name, at in marks
        ],
        sweet=_sweet(best, points, x(best.at), y(best.hit_rate), field) if best else None,
        rows=[(show(point.at), point.hit_rate, bool(best and point.at == best.at)) for point in points],
    )


def _sweet(best: SweetSpot, points: Sequence[Point], x: float, y: float, field: str) -> Sweet:
    first, last = points[0], points[-1]
    return Sweet(
        x=x,
        y=y,
        at=best.at,
        size=size(best.at),
        what=WHAT[field],
        field=field,
        first=size(first.at),
        last=size(last.at),
        before=best.hit_rate - first.hit_rate,
        beyond=last.hit_rate - best.hit_rate,
    )


def _bounds(lowest: float, highest: float) -> tuple[float, float]:
    """Of the scale: tens of percent around the curve, so that small differences can be seen."""
    floor = int(lowest * 10) / 10
    ceiling = min(1.0, (int(highest * 10) + 1) / 10)
    return (floor, ceiling) if ceiling - floor >= 0.1 else (max(0.0, ceiling - 0.1), ceiling)
