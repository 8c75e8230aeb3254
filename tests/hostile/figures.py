"""What a battle measures: each figure with its unit and, where one is promised, its limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any, Final

JSON_ID: Final = "hostile"


class Over(StrEnum):
    """What a figure is over several rounds."""

    WORST = "worst"
    SUM = "sum"
    MEDIAN = "median"


@dataclass(frozen=True)
class Figure:
    """`limit`: it holds up to there. None: it is shown, and judged by nobody."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    over: Over = Over.WORST

    @property
    def holds(self) -> bool:
        """Nothing measured is nothing held."""
        return self.limit is None or self.value <= self.limit

    def row(self) -> dict[str, Any]:
        """As benchmarks write it."""
        return {
            "id": f"{JSON_ID}.{self.name}",
            "value": None if math.isnan(self.value) else self.value,
            "unit": self.unit,
            "against": "",
            "ratio": None,
            "goal": self.limit,
            "holds": self.holds,
        }


def combined(rounds: Iterable[Sequence[Figure]]) -> list[Figure]:
    """One figure of each name, in the order in which they first came."""
    by_name: dict[str, list[Figure]] = {}
    for figures in rounds:
        for one in figures:
            by_name.setdefault(one.name, []).append(one)
    return [
        replace(same[0], value=_over([one.value for one in same], same[0].over))
        for same in by_name.values()
    ]


def _over(values: Sequence[float], over: Over) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    match over:
        case Over.SUM:
            return sum(values)
        case Over.MEDIAN:
            return median(values)
        case Over.WORST:
            return max(values)


def table(figures: Sequence[Figure]) -> str:
    """For people: figure, value, limit, and whether it holds."""
    rows = [("figure", "value", "limit", "holds")]
    for one in figures:
        limit = "" if one.limit is None else f"≤ {one.limit:,.4g} {one.unit}".rstrip()
        holds = "" if one.limit is None else "yes" if one.holds else "NO"
        rows.append((one.name, f"{one.value:,.4g} {one.unit}".rstrip(), limit, holds))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{name:<{widths[0]}}  {value:>{widths[1]}}  {limit:>{widths[2]}}  {holds}".rstrip()
        for name, value, limit, holds in rows
    )
