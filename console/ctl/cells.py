"""Values of the API as people read them: sizes, durations, ages by the names of their fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from console.ctl.resources import Form
from telemetry import units

NONE: Final = "-"
GOOD: Final = frozenset(
    {"ready", "running", "succeeded", "active", "true", "rail", "attached", "resolved"}
)
POOR: Final = frozenset({"pending", "cordoned", "draining", "maintenance", "undoing", "unknown", "leaf"})
BAD: Final = frozenset(
    {"lost", "firing", "stuck", "failed", "false", "page", "gone", "revoked", "no_data"}
)
_STYLES: Final = ((GOOD, "green"), (POOR, "yellow"), (BAD, "red"))
_TRANSLATED: Final = {
    "…": "...",
    "µ": "u",
    "→": "->",
    "“": '"',
    "”": '"',
}


def shown(value: Any, form: Form, now: float) -> str:
    """One value, on one line. What is absent is a dash."""
    if value is None or value in ("", [], {}):
        return "0" if form == "count" and value is not None else NONE
    if isinstance(value, list) and form != "count":
        comma = "," if all(isinstance(one, str) for one in value) else ", "  # else 1,234 is one number
        return comma.join(shown(one, form, now) for one in value)
    match form:
        case "size":
            return units.size(value)
        case "duration":
            return units.duration(value)
        case "rate":
            return units.shown(value, "bytes/s")
        case "age":
            return _age(value, now)
        case "count":
            return str(len(value)) if isinstance(value, Sequence | Mapping) else f"{value}"
        case "percent":
            return percent(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format(value, ".0f" if 1e5 <= abs(value) < 1e18 else "g")
    return printable(str(value))


def percent(value: float) -> str:
    return units.shown(value / 100, "share")


def form_of(name: str) -> Form:
    """What a field is, by its name: names end in units."""
    if name.endswith("_bytes") or name == "bytes":
        return "size"
    if name.endswith("bytes_per_second"):
        return "rate"
    if name.endswith("_seconds") or name == "seconds":
        return "duration"
    if name.endswith(("_at", "_since")) or name in ("at", "since", "until"):
        return "age"
    return "text"


def moment(value: str, now: float) -> str:
    """`2026-11-23T20:43:11Z (4 min ago)`."""
    return f"{value} ({_age(value, now)})"


def style_of(state: str) -> str:
    return next((style for states, style in _STYLES if state.lower() in states), "")


def printable(text: str) -> str:
    """Text of others, which must not be able to speak to a terminal."""
    return "".join(one if one.isprintable() else " " for one in text)


def spoken(text: str, encoding: str | None) -> str:
    """The text in what a terminal can show, and without what could speak to it, but with its lines."""
    text = "\n".join(map(printable, text.split("\n")))
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = "".join(_TRANSLATED.get(one, one) for one in text)
        return text.encode(encoding, "replace").decode(encoding)
    return text


def _age(value: str, now: float) -> str:
    try:
        at = datetime.fromisoformat(value).timestamp()
    except ValueError:
        return printable(str(value))
    return units.age(now - at)
