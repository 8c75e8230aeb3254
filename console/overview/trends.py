"""How a figure has gone: a small line of the last hour, and the same in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

WIDTH: Final = 104
HEIGHT: Final = 24
_MARGIN: Final = 2
_SAME: Final = 0.02  # of a figure: less is no change that anybody would look at

Values = Sequence[float | None]


def line(values: Values) -> str:
    """The path of an SVG of WIDTH by HEIGHT, from nothing to the most; broken where nothing is known."""
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
    """Against an hour ago, where the values begin, and against yesterday: which way, and how much.
    Nothing where nothing is known of then, or of now."""
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
            yield "", f"as {when}"
        else:
            way = "up" if apart > 0 else "down"
            yield way, f"{_said(apart, way, is_share=is_share)} {span}"


def _factor(now: float, before: float) -> float:
    """How much more it has become, as a part of what it was."""
    return now / before - 1 if before else inf * now if now else 0.0


def _said(apart: float, way: str, *, is_share: bool) -> str:
    """Shares differ by points; of all else it is the factor that counts."""
    if is_share:
        return f"{abs(apart) * 100:.0f} points {way}"
    if apart == inf:
        return "up from nothing"
    return f"{apart + 1:.3g} times" if apart >= 2 else f"{abs(apart) * 100:.0f} % {way}"
