"""The trend of a figure: a sparkline of the last hour, and changes in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

WIDTH: Final = 104
HEIGHT: Final = 24
_MARGIN: Final = 2
_SAME: Final = 0.02  # relative change below which a figure is shown as unchanged

Values = Sequence[float | None]


def line(values: Values) -> str:
    """The path of an SVG of WIDTH by HEIGHT, from zero to the maximum; missing values are gaps."""
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    apart = (WIDTH - 2 * _MARGIN) / max(1, len(values) - 1)
    high = HEIGHT - 2 * _MARGIN
    parts, pen = [], "M"
    for place, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        x, y = _MARGIN + place * apart, HEIGHT - _MARGIN - high * value / most
        parts.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return " ".join(parts)


def changes(
    values: Values, yesterday: float | None, *, is_share: bool = False
) -> Iterator[tuple[str, str]]:
    """Direction and size of the change since an hour ago (the first value) and since yesterday. Nothing
    where a value is missing."""
    now = values[-1] if values else None
    if now is None:
        return
    for before, when, span in (
        (values[0], "an hour ago", "in an hour"),
        (yesterday, "yesterday", "in a day"),
    ):
        if before is None:
            continue
        apart = now - before if is_share else _factor(now, before)
        if abs(apart) < _SAME:
            yield "", f"same as {when}"
        else:
            way = "up" if apart > 0 else "down"
            yield way, f"{_said(apart, way, is_share=is_share)} {span}"


def _factor(now: float, before: float) -> float:
    """The relative change."""
    return now / before - 1 if before else inf * now if now else 0.0


def _said(apart: float, way: str, *, is_share: bool) -> str:
    """Shares differ by percentage points, everything else by a factor."""
    if is_share:
        return f"{abs(apart) * 100:.0f} points {way}"
    if apart == inf:
        return "up from zero"
    return f"{apart + 1:.3g} times" if apart >= 2 else f"{abs(apart) * 100:.0f} % {way}"
