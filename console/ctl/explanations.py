"""What `explain` answers, with the names and values of the API in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from telemetry import units
from telemetry.metrics import words_of

# Their endings are units, by which values are shown.
_NAMES: Final = {
    "seconds": "first_token_seconds",
    "error_seconds": "compared_with_expected",
    "tier2": "in_tier_2",
    "tier2_tokens": "tier_2_tokens",
    "first": "first_column",
    "last": "last_column",
    "uses_max": "uses_at_most",
    "no_spill": "not_copied_to_tier_2",
    "expires_in_seconds": "expires_in",
}


def in_words(value: Any) -> Any:
    """The answer, or a part of it, to be described on a screen."""
    if isinstance(value, Mapping):
        return {_NAMES.get(name, name): _said(name, one) for name, one in value.items()}
    return [in_words(one) for one in value] if isinstance(value, list) else value


def _said(name: str, value: Any) -> Any:
    if name in ("outcome", "state", "no_spill") and isinstance(value, str):
        return words_of(value)
    if name == "slots" and value is not None:
        return _range(value, str)
    if name == "error_seconds" and value is not None:
        return f"{units.duration(abs(value))} {'later' if value > 0 else 'earlier'}"
    if name == "expires_in_seconds":
        return "never" if value is None else _range(value, units.duration)
    return in_words(value)


def _range(ends: list[Any], shown: Callable[[Any], str]) -> str:
    return " to ".join(dict.fromkeys(map(shown, ends)))
