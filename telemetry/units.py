"""Sizes, durations and rates: how all of Tidegate reads and writes them. Pure; all may import it.

Read, with or without a blank before the unit, in capitals or not:

    sizes      4096, 512MiB, 64GiB, 1.5TiB: powers of 1024; `Gi` and `G` are `GiB`
               512MB, 64GB: powers of 1000
    durations  90, 90s, 15m, 2h, 7d, 1w, 250ms, 1h30m, and ISO 8601: PT15M, P7D

A size is written in powers of 1024, which is how memory is bought and slots are aligned. What is
measured has three significant digits (`size`, `duration`). What people set and edit is exact
(`exact_size`, `exact_duration`): it reads back as the same number. figures.js writes the same;
docs/adr/0077-units.md says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from math import floor, isfinite
from typing import Final

Steps = Sequence[tuple[int, str]]  # units by their sizes, the smallest first

BYTES_MAX: Final = 1 << 60
SECONDS_MAX: Final = 1 << 60
SIZE_FORMS: Final = "512MiB or 64GiB (powers of 1024), 64GB (powers of 1000) or a number of bytes"
DURATION_FORMS: Final = "90s, 15m, 2h, 7d or 1h30m"

_PREFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_SIZES: Final = tuple((1024**power, f"{prefix}B") for power, prefix in enumerate(_PREFIXES))
_COUNTS: Final = tuple(
    (1000**power, letter) for power, letter in enumerate(("", "k", "M", "G", "T", "P"))
)
_MOMENTS: Final = ((1, "µs"), (1000, "ms"), (1_000_000, "s"))
_SPANS: Final = ((1, "s"), (60, "min"), (3600, "h"), (86_400, "d"))
_MINUTE_SHOWN: Final = 59.95  # three digits of it are 60.0

_NUMBER: Final = r"[0-9]{1,19}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}"
_SIZE: Final = re.compile(rf"({_NUMBER})\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_SIZES_READ: Final = {
    **dict.fromkeys(("", "b", "byte", "bytes"), 1),
    **{
        name: 1 << 10 * power
        for power, letter in enumerate("kmgtpe", start=1)
        for name in (letter, f"{letter}i", f"{letter}ib")
    },
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtpe", start=1)},
}
_SECONDS_READ: Final = {
    "w": (Fraction(7 * 86_400), "w|weeks?"),
    "d": (Fraction(86_400), "d|days?"),
    "h": (Fraction(3600), "h|hours?"),
    "m": (Fraction(60), "m|min|minutes?"),
    "s": (Fraction(1), "s|sec|seconds?"),
    "ms": (Fraction(1, 1000), "ms"),
    "us": (Fraction(1, 1_000_000), "us|µs"),
}
_DURATIONS: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.ASCII)
    for pattern in (
        rf"(?P<s>{_NUMBER})",
        "".join(
            rf"(?:(?P<{name}>{_NUMBER})\s*(?:{spellings})\s*)?"
            for name, (_, spellings) in _SECONDS_READ.items()
        ),
        (
            rf"P(?:(?P<w>{_NUMBER})W)?(?:(?P<d>{_NUMBER})D)?"
            rf"(?:T(?:(?P<h>{_NUMBER})H)?(?:(?P<m>{_NUMBER})M)?(?:(?P<s>{_NUMBER})S)?)?"
        ),
    )
)


class Unreadable(ValueError):
    """What was given is no such quantity, in a sentence that says what is."""


def parse_size(text: str, low: int = 0, high: int = BYTES_MAX) -> int:
    """A size in bytes, to the nearest whole one. Raises Unreadable, also out of bounds."""
    found = _SIZE.fullmatch(text.strip())
    unit = _SIZES_READ.get(found[2].lower()) if found else None
    amount = Fraction(found[1]) * unit if found and unit else None
    if amount is None or (unit == 1 and amount.denominator > 1):
        raise Unreadable(f"{text[:80]!r} is not a size. Write {SIZE_FORMS}.")
    count = int(amount + Fraction(1, 2))
    if not low <= count <= high:
        raise Unreadable(f"{text[:80]!r} is not from {exact_size(low)} to {exact_size(high)}.")
    return count


def parse_duration(text: str, low: int = 0, high: int = SECONDS_MAX) -> float:
    """A duration in seconds, as which a plain number is read. Raises Unreadable, also out of bounds."""
    return float(_seconds(text, low, high))


def parse_seconds(text: str, low: int = 0, high: int = SECONDS_MAX) -> int:
    """A duration of whole seconds. Raises Unreadable, also out of bounds."""
    amount = _seconds(text, low, high)
    if amount.denominator > 1:
        raise Unreadable(f"{text[:80]!r} is not a whole number of seconds. Write {DURATION_FORMS}.")
    return int(amount)


def exact_size(count: int) -> str:
    """`64 GiB`, `1536 MiB`, `4097 B`: what `parse_size` reads back as the same number."""
    unit, name = next((one for one in reversed(_SIZES) if count and count % one[0] == 0), _SIZES[0])
    return f"{count // unit} {name}"


def exact_duration(seconds: int) -> str:
    """`90 s` is `1 min 30 s`: what `parse_seconds` reads back as the same number."""
    parts = []
    for unit, name in reversed(_SPANS):
        amount, seconds = divmod(seconds, unit)
        if amount:
            parts.append(f"{amount} {name}")
    return " ".join(parts) or "0 s"


def size(count: float) -> str:
    """`1.5 TiB`: three digits are enough to decide by."""
    return _scaled(count, _SIZES)


def duration(seconds: float) -> str:
    """`350 µs`, `59.9 s`, `1 min 30 s`, `3 d 4 h`: three digits, or the two largest units."""
    if abs(seconds) < _MINUTE_SHOWN or not isfinite(seconds):
        return _scaled(seconds * 1e6, _MOMENTS) if seconds else "0 s"
    return f"{'-' if seconds < 0 else ''}{_span(abs(seconds))}"


def age(seconds: float) -> str:
    """`4 s ago`, `3 min ago`, `in 2 h`: one unit is enough, and what is not over is not counted."""
    distance = abs(seconds)
    unit, name = next((one for one in reversed(_SPANS) if distance >= one[0]), _SPANS[0])
    amount = f"{floor(distance / unit)} {name}"
    return f"{amount} ago" if seconds >= 0 else f"in {amount}"


def counted(count: float, one: str, more: str = "", *, zero: str = "0") -> str:
    """How many there are: `1 box`, `1,204 columns`, and `no boxes` by `zero="no"`. `more` is given where
    it is not `one` with an s or es; both may go on: `counted(free, "box is", "boxes are")`."""
    whole = round(count)  # an average is counted as it is shown
    amount = f"{whole:,}" if whole else zero
    more = more or one + ("es" if one.endswith(("s", "x", "ch", "sh")) else "s")
    return f"{amount} {one if whole == 1 else more}"


def shown(value: float, unit: str) -> str:
    """A number of a metric in `seconds`, `share`, `bytes`, `bytes/s`, or in thousands: `1.28 k/s`."""
    match unit:
        case "seconds":
            return duration(value)
        case "share":
            return _scaled(100 * value, ((1, "%"),))
        case "bytes" | "bytes/s":
            return size(value) + unit.removeprefix("bytes")
    return f"{_scaled(value, _COUNTS)}{unit}".strip()


def _seconds(text: str, low: int, high: int) -> Fraction:
    for pattern in _DURATIONS:
        found = pattern.fullmatch(text.strip())
        parts = {name: part for name, part in found.groupdict().items() if part} if found else {}
        if parts:
            amount = sum(
                (Fraction(part) * _SECONDS_READ[name][0] for name, part in parts.items()), Fraction()
            )
            if not low <= amount <= high:
                raise Unreadable(
                    f"{text[:80]!r} is not from {exact_duration(low)} to {exact_duration(high)}."
                )
            return amount
    raise Unreadable(f"{text[:80]!r} is not a duration. Write {DURATION_FORMS}.")


def _scaled(value: float, steps: Steps) -> str:
    """In the largest unit of which there is one, also where only rounding makes it one."""
    if not isfinite(value):
        return str(value)
    amount = abs(value)
    at = max((place for place, (unit, _) in enumerate(steps) if amount >= unit), default=0)
    unit, name = steps[at]
    digits = _three(amount / unit)
    if at + 1 < len(steps) and float(digits) * unit >= steps[at + 1][0]:
        digits, name = "1", steps[at + 1][1]
    return f"{'-' if value < 0 and digits != '0' else ''}{digits} {name}"


def _three(amount: float) -> str:
    """Three significant digits, or all before the point; halves go up, as in JavaScript."""
    if amount < 1e-6:
        return "0"
    exact = Decimal(amount)
    places = 2 - exact.adjusted()
    if places <= 0:
        return f"{exact.to_integral_value(ROUND_HALF_UP):f}"
    return f"{exact.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP):f}".rstrip("0").rstrip(".")


def _span(seconds: float) -> str:
    """The two largest units of a minute or more, to the nearest of the smaller one."""
    for at in range(1, len(_SPANS)):
        small, small_name = _SPANS[at - 1]
        whole = floor(seconds / small + 0.5) * small
        if at + 1 == len(_SPANS) or whole < _SPANS[at + 1][0]:
            break
    unit, name = _SPANS[at]
    amount, rest = divmod(whole, unit)
    return f"{amount} {name} {rest // small} {small_name}" if rest else f"{amount} {name}"
