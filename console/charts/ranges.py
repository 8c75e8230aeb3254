"""The time range of all charts of a page, which is in its URL. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

SPANS: Final[Mapping[str, int]] = {
    "15m": 900,
    "1h": 3600,
    "6h": 6 * 3600,
    "24h": 86_400,
    "7d": 7 * 86_400,
    "30d": 30 * 86_400,
}
DEFAULT: Final = "1h"
# What a range can be compared with: how many seconds earlier (a multiple of every step), and its label.
EARLIER: Final[Mapping[str, tuple[int, str]]] = {
    "day": (86_400, "yesterday"),
    "week": (7 * 86_400, "last week"),
}
NAMES: Final = ("range", "from", "until", "compare")  # in a URL
SECONDS_MIN: Final = 60
SECONDS_MAX: Final = 3 * 366 * 86_400
FAR_AWAY: Final = 1 << 33  # in 2242


class BadRange(ValueError):
    """The query has no valid range. The message says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Range:
    start: float  # seconds since 1970
    end: float
    name: str = ""  # of a span that ends now; empty for a fixed one

    @property
    def is_live(self) -> bool:
        return bool(self.name)

    @property
    def earlier_half(self) -> Range:
        """As long, and starting earlier by half of it."""
        by = (self.end - self.start) / 2
        return Range(self.start - by, self.end - by)

    @property
    def later_half(self) -> Range | None:
        """None for a range that ends now."""
        by = (self.end - self.start) / 2
        return None if self.is_live else Range(self.start + by, self.end + by)

    @property
    def wider(self) -> Range:
        """Twice as long around the same middle, within the limits. A live range becomes the next longer
        span; after the longest, twice as long before now."""
        length = self.end - self.start
        more = min(length, SECONDS_MAX - length) / 2
        if not self.is_live:
            return Range(self.start - more, self.end + more)
        longer = (name for name, seconds in SPANS.items() if seconds > SPANS[self.name])
        if name := next(longer, None):
            return Range(self.end - SPANS[name], self.end, name)
        return Range(self.start - 2 * more, self.end)

    @property
    def query(self) -> str:
        """The query of a URL."""
        return "&".join(f"{name}={value}" for name, value in self.fields)

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The fields of a form."""
        if self.name:
            return [("range", self.name)]
        return [("from", written(self.start)), ("until", written(self.end))]

    @property
    def from_at(self) -> datetime:
        return datetime.fromtimestamp(self.start, UTC)

    @property
    def until_at(self) -> datetime:
        return datetime.fromtimestamp(self.end, UTC)


def of_query(query: Mapping[str, str], now: float, seconds_min: float = SECONDS_MIN) -> Range:
    """The range in a query; by default the last hour. Raises BadRange."""
    if query.get("from") or query.get("until"):
        return _fixed(query.get("from", ""), query.get("until", ""), now, seconds_min)
    name = query.get("range") or DEFAULT
    if name not in SPANS:
        raise BadRange(f"Unknown range “{name[:20]}”. Use one of {', '.join(SPANS)}.")
    return Range(now - SPANS[name], now, name)


def _fixed(start: str, end: str, now: float, seconds_min: float) -> Range:
    last = _read(end) if end else now
    first = _read(start) if start else last - SPANS[DEFAULT]
    if not seconds_min <= last - first <= SECONDS_MAX:
        raise BadRange(
            f"A range must be {seconds_min:g} seconds to three years long, and end after it starts."
        )
    return Range(first, last)


def _read(text: str) -> float:
    """A time as browsers submit it, in UTC unless it has a zone."""
    try:
        at = datetime.fromisoformat(text)
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise BadRange(f"“{text[:40]}” is not a time. Write it as 2026-11-21T03:00.") from None
    if not SECONDS_MAX < seconds < FAR_AWAY:
        raise BadRange(f"“{text[:40]}” is out of range.")
    return seconds


def written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
